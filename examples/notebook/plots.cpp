// The plots: data files and gnuplot scripts in the output folder, drawn as PNG with gnuplot's cairo terminal.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "notebook.h"

namespace {

namespace fs = std::filesystem;

// Everything lies in one folder and gnuplot is started there, so that the scripts hold plain file names.
class Folder {
 public:
  explicit Folder(const std::string& path) : path_(path) {}

  std::ofstream create(const std::string& name) const {
    std::ofstream out(path_ / name, std::ios::binary);
    TORCH_CHECK(out, "cannot write ", (path_ / name).string());
    return out;
  }
  void draw(const std::string& name, const std::string& script, Checks& check) const {
    create(name + ".gp") << script;
    const auto png = path_ / (name + ".png");
    fs::remove(png);
    const bool good = std::system(("cd '" + path_.string() + "' && gnuplot '" + name + ".gp'").c_str()) == 0;
    check("plot " + png.string(), good && fs::exists(png) && fs::file_size(png) > 0);
  }

 private:
  fs::path path_;
};

void write_curve(const Folder& folder, const std::string& name, const Curve& curve) {
  auto out = folder.create(name);
  out << "# bits, relative error\n";
  for (const auto& [bits, error] : curve) out << bits << ' ' << error << '\n';
}

std::string percent(double error) { return format(error < 0.0995 ? "%.2g %%" : "%.0f %%", 1e2 * error); }

void draw_cliff(const Folder& folder, const Cliff& cliff, Checks& check) {
  write_curve(folder, "cliff_both.dat", cliff.both);
  write_curve(folder, "cliff_keys.dat", cliff.keys);
  write_curve(folder, "cliff_values.dat", cliff.values);
  write_curve(folder, "cliff_real.dat", cliff.real);
  write_curve(folder, "cliff_fp16.dat", {{16, cliff.fp16}});
  std::string labels;
  for (const auto& [bits, error] : cliff.both) {
    labels += format("set label '%s' at %lld,%g right offset -1,0.7 tc rgb '#b2182b' front\n", percent(error).c_str(),
                     static_cast<long long>(bits), error);
  }
  for (const auto& [bits, error] : cliff.real) {
    labels += format("set label '%s' at %lld,%g left offset 0.9,-0.7 tc rgb '#01665e' front\n", percent(error).c_str(),
                     static_cast<long long>(bits), error);
  }
  labels += format("set label \"fp16 rounding\\n%s\" at 16,%g left offset 1.2,-0.1 tc rgb '#555555' front\n",
                   percent(cliff.fp16).c_str(), cliff.fp16);
  const std::string real = cliff.real.empty()
                               ? ""
                               : ", 'cliff_real.dat' with linespoints lw 2.5 pt 5 ps 1.3 lc rgb '#01665e' "
                                 "title 'SmolLM2-135M, both, mean of layers'";
  folder.draw(
      "cliff",
      "set terminal pngcairo size 1100,720 font 'DejaVu Sans,12' enhanced\n"
      "set output 'cliff.png'\n"
      "set title 'The quality cliff: error of the attention output against bits per code' font ',15'\n"
      "set xlabel 'bits per code of K and V (log scale, fp16 on the left), groups of 32'\n"
      "set ylabel 'relative error of the attention output (log scale)'\n"
      "set logscale x 2\nset logscale y 10\n"
      "set xrange [22:0.8]\nset yrange [1e-4:10]\n"
      "set xtics ('16' 16, '8' 8, '4' 4, '3' 3, '2' 2, '1' 1)\n"
      "set ytics ('0.01 %%' 1e-4, '0.1 %%' 1e-3, '1 %%' 1e-2, '10 %%' 1e-1, '100 %%' 1, '1000 %%' 10)\n"
      "set mytics 10\nset grid xtics ytics back lt 1 lw 0.7 lc rgb '#d8d8d8'\n"
      "set key left top reverse Left samplen 3 spacing 1.25\n"
      "set object 1 rectangle from 4,graph 0 to 2,graph 1 fc rgb '#fff3e0' fs solid noborder behind\n"
      "set label 'below 4 bits' at 2.83,1.4e-4 center tc rgb '#a06000'\n" +
          labels +
          "plot 'cliff_both.dat' with linespoints lw 2.5 pt 7 ps 1.5 lc rgb '#b2182b' title 'random K and V, "
          "both quantised', "
          "'cliff_values.dat' with linespoints lw 1.5 dt 2 pt 8 ps 1.2 lc rgb '#ef8a62' title 'random, V alone', "
          "'cliff_keys.dat' with linespoints lw 1.5 dt 3 pt 10 ps 1.2 lc rgb '#2166ac' title 'random, K alone (4 "
          "outlier channels)'" +
          real + ", 'cliff_fp16.dat' with points pt 6 ps 1.6 lw 2 lc rgb '#555555' title 'KVCache that keeps fp16'\n",
      check);
}

// Largest and mean |x| of every channel, K beside V, one row a layer.
void draw_channels(const Folder& folder, const std::vector<Layer>& layers, Checks& check) {
  std::string plots;
  for (std::size_t i = 0; i < layers.size(); i++) {
    const auto& layer = layers[i];
    for (const char side : {'K', 'V'}) {
      const auto& x = side == 'K' ? layer.k : layer.v;
      const auto largest = x.abs().amax(1), mean = x.abs().mean(1);
      const auto name = format("channels_%c_%zu.dat", side, i);
      auto out = folder.create(name);
      out << "# channel, max |x|, mean |x| over the tokens\n";
      for (int64_t c = 0; c < x.size(0); c++) {
        out << c << ' ' << largest[c].item<float>() << ' ' << mean[c].item<float>() << '\n';
      }
      plots += format("set title '%s of %s: the largest mean is %.1f times the median one' offset 0,-0.6\n",
                      side == 'K' ? "Keys" : "Values", layer.name.c_str(), outlier_ratio(x));
      plots += format("set xrange [-1:%lld]\nset yrange [0:%g]\n", static_cast<long long>(x.size(0)),
                      1.15 * largest.max().item<double>());
      plots += format("set xtics %lld\n", static_cast<long long>(layer.head_dim));
      plots += i + 1 == layers.size() ? "set xlabel 'channel (the kv heads one after the other)'\n" : "unset xlabel\n";
      plots += side == 'K' ? "set ylabel '|x|' offset 1\n" : "unset ylabel\n";
      plots += i == 0 && side == 'V' ? "set key right top\n" : "unset key\n";
      plots += format(
          "plot '%s' using 1:2 with impulses lw 2.2 lc rgb '#92b4d4' title 'largest over tokens', "
          "'' using 1:3 with impulses lw 2.2 lc rgb '#1f4e79' title 'mean over tokens'\n",
          name.c_str());
    }
  }
  folder.draw(
      "kv_channels",
      format("set terminal pngcairo size 1300,%zu font 'DejaVu Sans,11' enhanced\n", 110 + 270 * layers.size()) +
          "set output 'kv_channels.png'\n" +
          format("set multiplot layout %zu,2 title 'SmolLM2-135M, magnitude of every channel (each panel has its own "
                 "scale)' font ',15'\n",
                 layers.size()) +
          "set grid ytics back lt 1 lw 0.7 lc rgb '#d8d8d8'\nset lmargin 8\nset rmargin 2\nset tics out nomirror\n" +
          plots + "unset multiplot\n",
      check);
}

// |x| as a picture, tokens along x and channels along y: outlier channels of K are bands along all tokens.
void draw_bands(const Folder& folder, const std::vector<Layer>& layers, Checks& check) {
  std::string plots;
  for (std::size_t i = 0; i < layers.size(); i++) {
    for (const char side : {'K', 'V'}) {
      const auto x = (side == 'K' ? layers[i].k : layers[i].v).abs().contiguous();
      const auto name = format("bands_%c_%zu.bin", side, i);
      folder.create(name).write(static_cast<const char*>(x.const_data_ptr()), static_cast<std::streamsize>(x.nbytes()));
      plots += format("set title '|%c| of %s' offset 0,-0.6\n", side, layers[i].name.c_str());
      plots += format("set xrange [-0.5:%lld-0.5]\nset yrange [-0.5:%lld-0.5]\nset cbrange [0:%g]\nset ytics %lld\n",
                      static_cast<long long>(x.size(1)), static_cast<long long>(x.size(0)),
                      torch::quantile(x.flatten(), 0.999).item<double>(), static_cast<long long>(layers[i].head_dim));
      plots += i + 1 == layers.size() ? "set xlabel 'token'\n" : "unset xlabel\n";
      plots += side == 'K' ? "set ylabel 'channel'\n" : "unset ylabel\n";
      plots += format("plot '%s' binary array=(%lld,%lld) format='%%float32' with image notitle\n", name.c_str(),
                      static_cast<long long>(x.size(1)), static_cast<long long>(x.size(0)));
    }
  }
  folder.draw(
      "kv_bands",
      format("set terminal pngcairo size 1300,%zu font 'DejaVu Sans,11' enhanced\n", 110 + 320 * layers.size()) +
          "set output 'kv_bands.png'\n" +
          format("set multiplot layout %zu,2 title 'SmolLM2-135M, magnitude by token and channel: keys have bands "
                 "along tokens in every layer' font ',15'\n",
                 layers.size()) +
          "set palette defined (0 '#000010', 0.15 '#2c115f', 0.4 '#b63679', 0.7 '#fb8861', 1 '#fcfdbf')\n"
          "set tics out nomirror\nset lmargin 10\nset rmargin 9\n" +
          plots + "unset multiplot\n",
      check);
}

}  // namespace

void draw_plots(const Options& options, const Cliff& cliff, const std::vector<Layer>& layers, Checks& check) {
  std::puts("\nPlots");
  if (std::system("gnuplot --version >/dev/null 2>&1") != 0) {
    std::puts("  NOT DRAWN: gnuplot is not installed (on Debian and Ubuntu: apt install gnuplot-nox).");
    return;
  }
  const Folder folder(options.output);
  draw_cliff(folder, cliff, check);
  if (layers.empty()) return;
  draw_channels(folder, layers, check);
  draw_bands(folder, layers, check);
}
