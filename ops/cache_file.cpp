// Caches in files. A file is a row of little-endian 64-bit words: "KIVICACH", version of the file, bytes of the file,
// checksum of all other words, number of caches; then for each cache its saved state (cache_state.cpp): number of
// integers and these, number of tensors, and for each its type (see kTypes), rank, sizes and data, filled up with zeros
// to a whole word.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kivi/cache.h"
#include "ops/atomic_file.h"
#include "ops/cache_storage.h"
#include "ops/checksum.h"
#include "ops/registration.h"

namespace kivi {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words and tensors are written as they are in memory");

using Word = uint64_t;
using Cache = c10::intrusive_ptr<KVCache>;

constexpr char kMagic[] = "KIVICACH";
constexpr Word kFileVersion = 1;
constexpr size_t kHeaderWords = 5, kChecksumWord = 3;
// Their places are their numbers in the file.
constexpr std::array kTypes = {at::kByte, at::kShort, at::kInt, at::kFloat, at::kHalf, at::kBFloat16};

using Header = std::array<Word, kHeaderWords>;

Header header_of(Word bytes, Word checksum, Word caches) {
  Header h = {0, kFileVersion, bytes, checksum, caches};
  std::memcpy(h.data(), kMagic, sizeof(Word));
  return h;
}

// ---------------------------------------------------------------------------------------------- writing

class Writer {
 public:
  explicit Writer(const std::string& path) : file_(path) { put(Header{}.data(), sizeof(Header)); }

  void add(const KVCache::State& state) {
    const auto& [name, ints, tensors] = state;
    put_word(ints.size());
    put(ints.data(), ints.size() * sizeof(Word));
    put_word(tensors.size());
    for (const at::Tensor& t : tensors) add(t.contiguous());
  }
  void commit(Word caches) {
    // The checksum covers the header too, with 0 in its own place. The sum of the rest goes first: it is known first.
    Header h = header_of(bytes_, 0, caches);
    sum_.add(h.data(), sizeof h);
    h[kChecksumWord] = static_cast<Word>(sum_.value());
    file_.write_at(0, h.data(), sizeof h);
    file_.commit();
  }

 private:
  void add(const at::Tensor& t) {
    const auto type = std::find(kTypes.begin(), kTypes.end(), t.scalar_type());
    TORCH_INTERNAL_ASSERT(type != kTypes.end());
    put_word(static_cast<Word>(type - kTypes.begin()));
    put_word(static_cast<Word>(t.dim()));
    for (const int64_t size : t.sizes()) put_word(static_cast<Word>(size));
    put(t.const_data_ptr(), t.nbytes());
    static constexpr char kZeros[sizeof(Word)] = {};
    if (const size_t rest = t.nbytes() % sizeof(Word))
      file_.write(kZeros, sizeof(Word) - rest), bytes_ += sizeof(Word) - rest;
  }
  void put_word(Word word) { put(&word, sizeof word); }
  void put(const void* data, size_t bytes) {
    if (bytes_ > 0) sum_.add(data, bytes);  // not the place of the header
    file_.write(data, bytes);
    bytes_ += bytes;
  }

  AtomicFile file_;
  Checksum sum_;
  Word bytes_ = 0;
};

// ---------------------------------------------------------------------------------------------- reading

class Reader {
 public:
  // O_NONBLOCK: a pipe is to be refused, not to be waited for.
  explicit Reader(std::string path)
      : path_(std::move(path)), file_(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    check_path(path_);
    TORCH_CHECK(file_.is_open(), "cannot read \"", path_, "\": ", system_reason(errno));
  }

  // Checks all of the file, then stands behind the header. Returns the number of caches.
  Word open_checked() {
    struct stat info = {};
    TORCH_CHECK(fstat(file_.number(), &info) == 0 && S_ISREG(info.st_mode), "cannot read \"", path_,
                "\": it is no regular file");
    left_ = static_cast<Word>(info.st_size);
    const Word size = left_;
    TORCH_CHECK_VALUE(size >= sizeof(Header), "\"", path_, "\" is no file of caches: it has ", size,
                      " bytes, less than the header of ", sizeof(Header));
    Header h;
    read(h.data(), sizeof h);
    TORCH_CHECK_VALUE(std::memcmp(h.data(), kMagic, sizeof(Word)) == 0, "\"", path_,
                      "\" is no file of caches: it does not begin with ", kMagic);
    TORCH_CHECK_VALUE(h[1] == kFileVersion, "\"", path_, "\" has version ", h[1], ", but this library reads version ",
                      kFileVersion);
    TORCH_CHECK_VALUE(h[2] == size, "\"", path_, "\" is damaged: it has ", size, " bytes, but ", h[2], " were written");
    const Word saved = std::exchange(h[kChecksumWord], 0);
    Checksum sum;
    std::vector<char> part(size_t{1} << 20);
    while (left_ > 0) {
      const auto bytes = static_cast<size_t>(std::min<Word>(left_, part.size()));
      read(part.data(), bytes);
      sum.add(part.data(), bytes);
    }
    sum.add(h.data(), sizeof h);
    TORCH_CHECK_VALUE(static_cast<Word>(sum.value()) == saved, "\"", path_, "\" is damaged: the checksum is ",
                      static_cast<Word>(sum.value()), ", but ", saved, " was saved");
    TORCH_CHECK(lseek(file_.number(), sizeof h, SEEK_SET) == sizeof h, "cannot read \"", path_, "\"");
    left_ = size - sizeof h;
    return h[4];
  }

  Cache cache() {
    std::vector<int64_t> ints(count("integers", 1));
    read(ints.data(), ints.size() * sizeof(Word));
    std::vector<at::Tensor> tensors(count("tensors", 2));
    for (at::Tensor& t : tensors) t = tensor();
    return KVCache::from_state({"kivi.KVCache", std::move(ints), std::move(tensors)});
  }
  // A number of things that take at least `words` words each, so that what follows can hold them.
  size_t count(const char* what, Word words) {
    const Word n = word();
    TORCH_CHECK_VALUE(n <= left_ / sizeof(Word) / words, "\"", path_, "\" is damaged: ", n, " ", what, ", but only ",
                      left_, " bytes follow");
    return static_cast<size_t>(n);
  }
  void finish() const {
    TORCH_CHECK_VALUE(left_ == 0, "\"", path_, "\" is damaged: ", left_, " bytes follow the last cache");
  }

 private:
  at::Tensor tensor() {
    const Word type = word(), rank = word();
    TORCH_CHECK_VALUE(type < kTypes.size() && rank <= 4, "\"", path_, "\" is damaged: a tensor of type ", type,
                      " and rank ", rank);
    std::vector<int64_t> sizes;
    const Word size = c10::elementSize(kTypes[type]), most = left_ / size;
    Word numel = 1;
    for (Word d = 0; d < rank; d++) {
      const Word n = word();
      // An axis of no elements does not make the others free: what they multiply to must still be a number.
      TORCH_CHECK_VALUE(n <= most && (n == 0 || numel <= most / n), "\"", path_,
                        "\" is damaged: a tensor of more than ", most, " elements, but only ", left_, " bytes follow");
      numel *= std::max<Word>(n, 1);
      sizes.push_back(static_cast<int64_t>(n));
    }
    at::Tensor t = at::empty(sizes, kTypes[type]);
    const Word bytes = t.nbytes(), whole = (bytes + sizeof(Word) - 1) / sizeof(Word) * sizeof(Word);
    TORCH_CHECK_VALUE(whole <= left_, "\"", path_, "\" is damaged: a tensor of ", bytes, " bytes, but only ", left_,
                      " follow");
    read(t.mutable_data_ptr(), bytes);
    Word zeros = 0;
    read(&zeros, whole - bytes);
    return t;
  }
  Word word() {
    Word w = 0;
    TORCH_CHECK_VALUE(left_ >= sizeof w, "\"", path_, "\" is damaged: it ends too early");
    read(&w, sizeof w);
    return w;
  }
  // What is there, as the caller has made sure.
  void read(void* data, size_t bytes) {
    auto* at = static_cast<char*>(data);
    left_ -= bytes;
    while (bytes > 0) {
      const ssize_t got = ::read(file_.number(), at, bytes);
      if (got < 0 && errno == EINTR) continue;
      TORCH_CHECK(got > 0, "cannot read \"", path_,
                  "\": ", got < 0 ? system_reason(errno) : "it became shorter while it was read");
      at += got;
      bytes -= static_cast<size_t>(got);
    }
  }

  std::string path_;
  FileDescriptor file_;
  Word left_ = 0;
};

}  // namespace

void save_caches(const std::vector<Cache>& caches, const std::string& path) {
  for (size_t i = 0; i < caches.size(); i++) TORCH_CHECK(caches[i], "caches[", i, "] is no cache");
  const NoModes no_modes;
  Writer writer(path);
  for (const Cache& cache : caches) writer.add(cache->state());
  writer.commit(caches.size());
}

std::vector<Cache> load_caches(const std::string& path) {
  const NoModes no_modes;
  Reader reader(path);
  const Word count = reader.open_checked();
  std::vector<Cache> caches;
  for (Word i = 0; i < count; i++) caches.push_back(reader.cache());
  reader.finish();
  return caches;
}

}  // namespace kivi

// CompositeImplicitAutograd: they take no tensor.
TORCH_LIBRARY_IMPL(kivi, CompositeImplicitAutograd, m) {
  if (!kivi::registers_operators()) return;
  m.impl("save_caches", [](const std::vector<kivi::Cache>& caches, std::string_view path) {
    kivi::save_caches(caches, std::string(path));
  });
  m.impl("load_caches", [](std::string_view path) { return kivi::load_caches(std::string(path)); });
}
