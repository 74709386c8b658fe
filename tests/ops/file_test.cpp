// Caches in files: what is saved comes back, a file that is not whole or not what was written is refused, and whatever
// happens to a writer, the file of before or the new one is there.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "tests/ops/model.h"
#include "tests/sealed.h"

namespace kivi::test {
namespace {

namespace fs = std::filesystem;
using Caches = std::vector<c10::intrusive_ptr<KVCache>>;

// A folder of its own for each test.
class File : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "kivi_file_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name = "caches.kivi") const { return (folder_ / name).string(); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  fs::path folder_;
};

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

c10::intrusive_ptr<KVCache> filled_cache(const CacheOptions& o, const std::vector<int64_t>& lengths, uint64_t seed,
                                         at::ScalarType type = at::kFloat) {
  auto cache = c10::make_intrusive<KVCache>(o);
  const auto batch = static_cast<int64_t>(lengths.size());
  const int64_t most = *std::max_element(lengths.begin(), lengths.end());
  cache->append(randn({batch, o.num_kv_heads, most, o.head_dim}, seed, type),
                randn({batch, o.num_kv_heads, most, o.value_head_dim.value_or(o.head_dim)}, seed + 1, type),
                longs(lengths));
  return cache;
}

Caches one_of_each() {
  Caches caches;
  CacheOptions o = options_of(2, 24, 16, 8, 4, 3, 1);
  o.value_head_dim = 40;
  caches.push_back(filled_cache(o, {175, 9, 0, 60}, 1, at::kHalf));
  caches.push_back(c10::make_intrusive<KVCache>(o));
  for (const char* recipe : {"kivi", "compact", "balanced", "quality", "near-lossless"}) {
    CacheOptions r;
    r.num_kv_heads = 2, r.head_dim = 64, r.recipe = recipe, r.residual_length = 32;
    caches.push_back(filled_cache(r, {300, 41}, 3, at::kBFloat16));
  }
  caches[2]->repeat_interleave(3);
  caches[3]->truncate(200);
  o.precision = "exact", o.scale_dtype = "float32";
  caches.push_back(filled_cache(o, {3}, 5));
  caches.push_back(filled_cache(options_of(2, 16, 16, 8, 4, 2, 1), {90}, 7));
  const at::Tensor far = randn({1, 2, 60, 16}, 8) * 1e5;  // widens the scales
  caches.back()->append(far, far);
  return caches;
}

void expect_equal(const Caches& got, const Caches& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); i++) {
    SCOPED_TRACE("cache " + std::to_string(i));
    EXPECT_TRUE(same_state(got[i]->state(), want[i]->state()));
    EXPECT_EQ(got[i]->options().precision, want[i]->options().precision);
  }
}

TEST_F(File, EveryCacheComesBackAndGoesOn) {
  const Caches caches = one_of_each();
  save_caches(caches, path());
  EXPECT_EQ(files(), std::vector<std::string>{"caches.kivi"});
  Caches loaded = load_caches(path());
  expect_equal(loaded, caches);
  for (const Caches& both : {caches, loaded}) {
    for (const auto& cache : both) {
      if (cache->empty()) continue;
      const Format& f = cache->format();
      const auto type = std::get<0>(cache->dequantize()).scalar_type();
      cache->append(randn({cache->batch_size(), f.num_kv_heads, 50, f.head_dim}, 11, type),
                    randn({cache->batch_size(), f.num_kv_heads, 50, f.value_head_dim}, 12, type));
    }
  }
  expect_equal(loaded, caches);
  save_caches({}, path());
  EXPECT_TRUE(load_caches(path()).empty());
}

TEST_F(File, HasTheSizeOfTheTokensHeldWhateverTheCapacity) {
  struct Row {
    std::vector<int64_t> lengths;
    int64_t reserve, truncate;
  };
  for (const Row& row : {Row{{1000}, 0, 2000},
                         {{4000}, 50000, 700},
                         {{417}, 0, 417},
                         {{2000, 3, 3, 3, 3, 300}, 9000, 900},
                         {{300, 1, 0, 900}, 0, 1000}}) {
    for (const char* recipe : {"kivi", "quality"}) {
      CacheOptions o;
      o.num_kv_heads = 2, o.head_dim = 128, o.recipe = recipe;
      const auto cache = filled_cache(o, row.lengths, 21, at::kHalf);
      if (row.reserve > 0) cache->reserve(row.reserve);
      cache->truncate(row.truncate);
      const Format& f = cache->format();
      const at::Tensor quantized = cache->quantized_lengths(), exact = cache->lengths() - quantized;
      const int64_t records = quantized.sum().item<int64_t>() / f.group_size * f.num_kv_heads;
      int64_t held = records * record_layout(f).bytes + exact.sum().item<int64_t>() * f.num_kv_heads * 256 * 2;
      if (f.num_key_classes > 0) held += cache->batch_size() * f.num_kv_heads * f.head_dim * (2 + 4);
      EXPECT_GE(held, 50000);
      save_caches({cache}, path());
      const auto size = static_cast<int64_t>(fs::file_size(path()));
      EXPECT_GE(size, held);
      EXPECT_LE(static_cast<double>(size), 1.01 * static_cast<double>(held)) << recipe << " " << row.lengths;
    }
  }
}

// A cache of each kind of tensor, in few bytes.
Caches small_caches() {
  CacheOptions o = options_of(1, 20, 16, 3, 2, 2, 1);
  o.k_classes = {16, 4, 4, 2};
  return {filled_cache(o, {40, 23}, 31, at::kHalf), filled_cache(options_of(1, 17, 16, 3, 1), {23}, 33)};
}

void expect_refused(const std::string& path, const std::vector<std::string>& words = {}) {
  std::vector<std::string> all = words;
  all.push_back("\"" + path + "\"");
  expect_error([&] { load_caches(path); }, all);
}

TEST_F(File, EveryLengthButItsOwnIsRefused) {
  save_caches(small_caches(), path());
  const std::string good = read_file(path());
  write_file(path(), good + std::string(1000, '\0'));
  for (size_t size = good.size() + 1000; size-- > 0;) {
    fs::resize_file(path(), size);
    if (size == good.size()) continue;
    SCOPED_TRACE(size);
    expect_refused(path(), {size < kFileHeaderBytes ? "no file of caches" : "damaged"});
    if (HasFatalFailure() || HasNonfatalFailure()) break;
  }
  // With a size and a checksum that fit, too.
  for (size_t size = kFileHeaderBytes; size < good.size(); size += 8) {
    write_file(path(), sealed(good.substr(0, size)));
    SCOPED_TRACE(size);
    expect_error([&] { load_caches(path()); }, {});
  }
  write_file(path(), sealed(good + std::string(8, '\0')));
  expect_refused(path(), {"8 bytes follow"});
}

TEST_F(File, EveryFlippedBitIsRefused) {
  save_caches(small_caches(), path());
  const std::string good = read_file(path());
  ASSERT_GT(good.size(), 1000u);
  expect_equal(load_caches(path()), small_caches());
  const int file = open(path().c_str(), O_WRONLY);
  ASSERT_GE(file, 0);
  const auto flip = [&](size_t bit, bool on) {
    const char byte = static_cast<char>(good[bit / 8] ^ (on ? 1 << bit % 8 : 0));
    ASSERT_EQ(pwrite(file, &byte, 1, static_cast<off_t>(bit / 8)), 1);
  };
  const auto check = [&](size_t bit) {
    flip(bit, true);
    SCOPED_TRACE("bit " + std::to_string(bit));
    expect_refused(path());
    flip(bit, false);
  };
  for (size_t bit = 0; bit < kFileHeaderBytes * 8; bit++) check(bit);
  std::mt19937_64 rng(41);
  for (int i = 0; i < 10000; i++) check(kFileHeaderBytes * 8 + rng() % (good.size() * 8 - kFileHeaderBytes * 8));
  close(file);
  expect_equal(load_caches(path()), small_caches());
}

TEST_F(File, OtherFilesAreRefusedByName) {
  save_caches(small_caches(), path());
  const std::string good = read_file(path());
  const auto with_word = [&](size_t at, uint64_t word) {
    std::string bad = good;
    std::memcpy(bad.data() + at, &word, sizeof word);
    write_file(path(), at == kFileChecksumAt ? bad : sealed(bad));
  };
  for (const uint64_t version : {0, 2, 99}) {
    with_word(8, version);
    expect_refused(path(), {"version " + std::to_string(version), "reads version 1"});
  }
  with_word(0, 0x4B56495649564B);
  expect_refused(path(), {"KIVICACH"});
  for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{3}, ~uint64_t{0}}) {
    with_word(32, count);
    expect_refused(path(), {"damaged"});
  }
  // The numbers of integers and tensors, types, ranks and sizes: everything up to the first data.
  uint64_t ints = 0;
  std::memcpy(&ints, good.data() + kFileHeaderBytes, sizeof ints);
  const size_t first_tensor = kFileHeaderBytes + 8 + ints * 8;
  for (const size_t at :
       {kFileHeaderBytes, first_tensor, first_tensor + 8, first_tensor + 16, first_tensor + 24, first_tensor + 32}) {
    uint64_t word = 0;
    std::memcpy(&word, good.data() + at, sizeof word);
    for (const uint64_t other :
         {word + 1, word - 1, word * 2 + 1, uint64_t{1} << 31, uint64_t{1} << 61, uint64_t{1} << 63, ~uint64_t{0}}) {
      if (other == word) continue;
      with_word(at, other);
      SCOPED_TRACE("word at " + std::to_string(at) + " is " + std::to_string(other));
      expect_error([&] { load_caches(path()); }, {});
    }
  }
  // Sizes of which each could be and all together cannot: no memory is asked for.
  std::string large = good.substr(0, kFileHeaderBytes) + std::string(5000, '\0');
  const uint64_t one = 1, words[] = {0, 1, 0, 4, 4096, 4096, 4096, 4096};  // integers, tensors, type, rank, sizes
  std::memcpy(large.data() + 32, &one, sizeof one);
  std::memcpy(large.data() + kFileHeaderBytes, words, sizeof words);
  write_file(path(), sealed(large));
  expect_refused(path(), {"damaged", "elements"});

  write_file(path(), "");
  expect_refused(path(), {"0 bytes"});
  write_file(path(), std::string(5000, 'x'));
  expect_refused(path(), {"KIVICACH"});
  expect_error([&] { load_caches(path("missing")); }, {"cannot read", path("missing"), "No such file"});
  expect_error([&] { load_caches(folder_.string()); }, {"cannot read", folder_.string(), "regular"});
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);  // which nobody writes to: reading it would wait for ever
  expect_error([&] { load_caches(path("pipe")); }, {"cannot read", path("pipe"), "regular"});
  expect_error([&] { load_caches(path() + '\0' + "more"); }, {"path", path(), "NUL"});
}

TEST_F(File, ErrorsOfWritingLeaveTheOldFile) {
  const Caches caches = small_caches();
  save_caches(caches, path());
  const std::string good = read_file(path());
  const auto unchanged = [&] {
    EXPECT_EQ(read_file(path()), good);
    EXPECT_EQ(files(), std::vector<std::string>{"caches.kivi"});
  };
  expect_error([&] { save_caches({caches[0], {}}, path()); }, {"caches[1]"});
  unchanged();
  expect_error([&] { save_caches(caches, path("no/folder")); }, {"cannot write", path("no/folder"), "No such file"});
  expect_error([&] { save_caches(caches, folder_.string()); }, {"cannot write", folder_.string(), "regular"});
  expect_error([&] { save_caches(caches, path() + '\0' + "more"); }, {"path", path(), "NUL"});
  expect_error([&] { save_caches(caches, ""); }, {"cannot write \"\""});
  unchanged();
  // Something else where the partial file goes: a pipe that nobody reads, a link to another file.
  const std::string partial = path() + ".partial";
  ASSERT_EQ(mkfifo(partial.c_str(), 0600), 0);
  expect_error([&] { save_caches(caches, path()); }, {"cannot write", path()});
  fs::remove(partial);
  write_file(path("other"), "precious");
  fs::create_symlink(path("other"), partial);
  expect_error([&] { save_caches(caches, path()); }, {"cannot write", path()});
  fs::remove(partial);
  fs::create_hard_link(path("other"), partial);
  expect_error([&] { save_caches(caches, path()); }, {"cannot write", path(), partial, "another file"});
  EXPECT_EQ(read_file(path("other")), "precious");
  fs::remove(partial);
  fs::create_symlink(path("missing"), path("link"));
  expect_error([&] { save_caches(caches, path("link")); }, {"cannot write", path("link"), "nowhere"});
  EXPECT_TRUE(fs::is_symlink(path("link")));
  fs::remove(path("link"));
  fs::remove(path("other"));
  unchanged();
  // A full disk: no file may become longer than the first write.
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t bytes : {0, 8, 40, 300, 1000}) {
    const rlimit small = {bytes, limit.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    std::string message;
    try {
      save_caches(caches, path());
    } catch (const c10::Error& e) {
      message = e.what_without_backtrace();
    }
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    EXPECT_NE(message.find("cannot write \"" + path() + "\": File too large"), std::string::npos) << message;
    unchanged();
  }
  std::signal(SIGXFSZ, handler);
  // Somebody else is writing it.
  const int other = open(path("caches.kivi.partial").c_str(), O_CREAT | O_WRONLY, 0666);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  ASSERT_EQ(write(other, "half", 4), 4);
  expect_error([&] { save_caches(caches, path()); }, {"cannot write", path(), "another call is writing it"});
  EXPECT_EQ(read_file(path()), good);
  EXPECT_EQ(read_file(path("caches.kivi.partial")), "half");
  // Until it is gone; what it left is overwritten.
  close(other);
  save_caches(caches, path());
  unchanged();
}

TEST_F(File, KeepsLinksAndPermissions) {
  const Caches caches = small_caches();
  write_file(path("target"), "old");
  ASSERT_EQ(chmod(path("target").c_str(), 0640), 0);
  fs::create_symlink("target", path("link"));
  save_caches(caches, path("link"));
  EXPECT_TRUE(fs::is_symlink(path("link")));
  expect_equal(load_caches(path("target")), caches);
  EXPECT_EQ(static_cast<int>(fs::status(path("target")).permissions()), 0640);
  const mode_t mask = umask(027);
  save_caches(caches, path("new"));
  umask(mask);
  EXPECT_EQ(static_cast<int>(fs::status(path("new")).permissions()), 0640);
}

// Several threads save to one path: each succeeds or is told that another one is writing, and the file is always whole.
TEST_F(File, ManyWritersOfOnePath) {
  const Caches caches = small_caches();
  std::atomic<int> written{0}, busy{0}, other{0};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; i++) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 50; n++) {
        try {
          save_caches({caches[i % 2]}, path());
          written++;
        } catch (const c10::Error& e) {
          (std::string(e.what()).find("another call is writing") != std::string::npos ? busy : other)++;
        }
        if (written > 0 && load_caches(path()).size() != 1) other++;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(written + busy, 200);
  EXPECT_GT(written, 0);
  EXPECT_EQ(other, 0);
  EXPECT_EQ(files(), std::vector<std::string>{"caches.kivi"});
}

// A process that writes one of two contents after the other is killed at any moment, 200 times.
TEST_F(File, AKilledWriterLeavesTheOldFileOrTheNewOne) {
  CacheOptions o;
  o.num_kv_heads = 8, o.head_dim = 128;
  const Caches contents[] = {{filled_cache(o, {2000}, 51, at::kHalf)}, {filled_cache(o, {1500}, 53, at::kHalf)}};
  const KVCache::State states[] = {contents[0][0]->state(), contents[1][0]->state()};
  save_caches(contents[0], path());
  std::mt19937 rng(55);
  int seen[2] = {}, halves = 0;
  for (int kill_number = 0; kill_number < 200; kill_number++) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      at::set_num_threads(1);  // the threads of the parent are not here
      for (int i = 1;; i++) save_caches(contents[(kill_number + i) % 2], path());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500 + rng() % 15000));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the writer failed by itself: " << status;
    halves += fs::exists(path("caches.kivi.partial"));
    const Caches loaded = load_caches(path());
    ASSERT_EQ(loaded.size(), 1u);
    const size_t which = loaded[0]->length() == 2000 ? 0 : 1;
    seen[which]++;
    ASSERT_TRUE(same_state(loaded[0]->state(), states[which])) << "kill " << kill_number;
  }
  std::cout << "200 kills: the first content " << seen[0] << " times, the second " << seen[1]
            << "; killed while writing " << halves << "\n";
  EXPECT_GT(halves, 0) << "no kill came while a file was written";
  save_caches(contents[1], path());
  EXPECT_EQ(files(), std::vector<std::string>{"caches.kivi"});
}

}  // namespace
}  // namespace kivi::test
