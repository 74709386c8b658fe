#include "plot.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace {

// A text between single quotes, as gnuplot reads it.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "''" : std::string(1, c);
  return result + "'";
}

// Candidates that no other beats in both bits and error, by bits.
std::vector<kivi::LayerCandidate> front(const kivi::LayerCalibration& layer) {
  std::vector<kivi::LayerCandidate> sorted = layer.candidates, kept;
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.bits != b.bits ? a.bits < b.bits : a.error < b.error; });
  for (const auto& c : sorted) {
    if (kept.empty() || c.error < kept.back().error) kept.push_back(c);
  }
  return kept;
}

}  // namespace

void check_gnuplot() {
  if (std::system("gnuplot --version >/dev/null 2>&1") != 0) {
    throw std::invalid_argument("--plot needs gnuplot (on Debian and Ubuntu: apt-get install gnuplot-nox)");
  }
}

void plot(const std::vector<kivi::LayerCalibration>& layers, double budget, const std::string& file) {
  double least = budget, most = budget;
  for (const auto& layer : layers) {
    for (const auto& c : layer.candidates) least = std::min(least, c.bits), most = std::max(most, c.bits);
  }
  const auto number = [](double value) { return std::to_string(value); };
  std::string script =
      "set terminal pngcairo size 1200,760 font 'DejaVu Sans,12'\n"
      "set output " +
      quoted(file) +
      "\n"
      "set title 'What each layer loses, and what it gets' font ',15'\n"
      "set xlabel 'bits per number of K and V (log scale)'\n"
      "set ylabel 'squared relative error of the attention output (log scale)'\n"
      "set logscale xy\nset xrange [" +
      number(least / 1.05) + ":" + number(most * 1.05) +
      "]\nset xtics (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)\nset format y '10^{%T}'\nset grid xtics "
      "ytics back lt 1 lw 0.7 lc rgb '#d8d8d8'\n"
      "set cblabel 'layer'\nset palette defined (0 '#440154', 0.35 '#31688e', 0.7 '#35b779', 1 '#fde725')\n"
      "set key right top\n"
      "set arrow 1 from first " +
      number(budget) + ", graph 0 to first " + number(budget) +
      ", graph 1 nohead dt 2 lc rgb '#b2182b'\n"
      "set label 1 ' budget' at first " +
      number(budget) + ", graph 0.03 tc rgb '#b2182b'\n";
  const auto point = [](const kivi::LayerCandidate& c, int64_t layer) {
    char text[96];
    // An error of 0 has no place on a log scale.
    std::snprintf(text, sizeof text, "%.6g %.6g %lld\n", c.bits, std::max(c.error, 1e-12),
                  static_cast<long long>(layer));
    return std::string(text);
  };
  script += "$lines << END\n";
  for (const auto& layer : layers) {
    for (const auto& c : front(layer)) script += point(c, layer.layer);
    script += "\n";
  }
  script += "END\n$chosen << END\n";
  for (const auto& layer : layers) script += point(layer.candidates[static_cast<size_t>(layer.chosen)], layer.layer);
  script +=
      "END\nplot $lines using 1:2:3 with linespoints pt 7 ps 0.5 lw 1.2 lc palette title 'a layer: its best "
      "candidates', "
      "$chosen using 1:2:3 with points pt 7 ps 1.4 lc palette notitle, "
      "$chosen using 1:2 with points pt 6 ps 1.4 lw 1.8 lc rgb 'black' title 'chosen'\n";
  std::signal(SIGPIPE, SIG_IGN);  // a gnuplot that stops early is told by its exit status
  std::FILE* pipe = popen("gnuplot", "w");
  if (pipe == nullptr) throw std::runtime_error("gnuplot could not be started");
  std::fwrite(script.data(), 1, script.size(), pipe);
  if (pclose(pipe) != 0) throw std::runtime_error("gnuplot could not draw '" + file + "'");
}
