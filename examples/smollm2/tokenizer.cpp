#include "tokenizer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace smollm2 {
namespace {

// Reads the little-endian data from front to back.
class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  std::string_view bytes(std::size_t size) {
    if (size > data_.size() - at_) throw std::runtime_error("tokenizer data ends too early");
    at_ += size;
    return data_.substr(at_ - size, size);
  }
  uint32_t number(std::size_t size) {
    const std::string_view raw = bytes(size);
    uint32_t value = 0;
    for (std::size_t i = 0; i < size; ++i)
      value |= static_cast<uint32_t>(static_cast<unsigned char>(raw[i])) << (8 * i);
    return value;
  }
  uint32_t u32() { return number(4); }
  bool at_end() const { return at_ == data_.size(); }

 private:
  std::string_view data_;
  std::size_t at_ = 0;
};

std::vector<std::pair<uint32_t, uint32_t>> read_ranges(Reader* in) {
  std::vector<std::pair<uint32_t, uint32_t>> ranges(in->u32());
  for (auto& [first, last] : ranges) {
    first = in->u32();
    last = in->u32();
  }
  return ranges;
}

bool contains(const std::vector<std::pair<uint32_t, uint32_t>>& ranges, uint32_t code_point) {
  const auto next = std::upper_bound(ranges.begin(), ranges.end(), code_point,
                                     [](uint32_t c, const auto& range) { return c < range.first; });
  return next != ranges.begin() && code_point <= std::prev(next)->second;
}

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// The code point at text[at] and its size in bytes. A byte that starts no valid UTF-8 sequence gives {invalid, 1}.
constexpr uint32_t kInvalid = 0xFFFFFFFF;
std::pair<uint32_t, std::size_t> code_point_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[i])); };
  const uint32_t lead = byte(at);
  if (lead < 0x80) return {lead, 1};
  const std::size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || size > text.size() - at) return {kInvalid, 1};
  uint32_t code = lead & (0xFFU >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return {kInvalid, 1};
    code = code << 6 | (byte(at + i) & 0x3F);
  }
  const uint32_t smallest = size == 4 ? 0x10000 : size == 3 ? 0x800 : 0x80;
  if (code < smallest || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return {kInvalid, 1};
  return {code, size};
}

}  // namespace

Tokenizer::Tokenizer(std::string_view data) {
  Reader in(data);
  if (in.bytes(8) != "KIVITOK1") throw std::runtime_error("not tokenizer data: it does not begin with KIVITOK1");
  tokens_.resize(in.u32());
  std::fill(std::begin(byte_token_), std::end(byte_token_), -1);
  for (std::size_t id = 0; id < tokens_.size(); ++id) {
    const bool special = in.number(1) != 0;
    tokens_[id] = std::string(in.bytes(in.number(2)));
    if (special) {
      specials_.push_back(static_cast<int32_t>(id));
    } else if (tokens_[id].size() == 1) {
      byte_token_[static_cast<unsigned char>(tokens_[id][0])] = static_cast<int32_t>(id);
    }
  }
  std::stable_sort(specials_.begin(), specials_.end(), [&](int32_t a, int32_t b) {
    return tokens_[std::size_t(a)].size() > tokens_[std::size_t(b)].size();
  });
  const uint32_t merges = in.u32();
  for (uint32_t rank = 0; rank < merges; ++rank) {
    const auto left = static_cast<int32_t>(in.u32());
    const auto right = static_cast<int32_t>(in.u32());
    merges_.emplace(pair_key(left, right), Merge{static_cast<int32_t>(rank), static_cast<int32_t>(in.u32())});
  }
  letters_ = read_ranges(&in);
  numbers_ = read_ranges(&in);
  spaces_ = read_ranges(&in);
  if (!in.at_end()) throw std::runtime_error("tokenizer data is longer than it says");
}

Tokenizer::Kind Tokenizer::kind(uint32_t code_point) const {
  if (contains(letters_, code_point)) return Kind::kLetter;
  if (contains(numbers_, code_point)) return Kind::kNumber;
  if (contains(spaces_, code_point)) return Kind::kSpace;
  return Kind::kOther;
}

std::vector<Tokenizer::Character> Tokenizer::characters(std::string_view text) const {
  std::vector<Character> found;
  found.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto [code, size] = code_point_at(text, at);
    found.push_back({kind(code), at});
    at += size;
  }
  return found;
}

std::vector<int64_t> Tokenizer::encode(std::string_view text, bool special) const {
  std::vector<int64_t> ids;
  std::size_t begin = 0;
  for (std::size_t at = 0; special && at < text.size();) {
    const auto hit = std::find_if(specials_.begin(), specials_.end(), [&](int32_t id) {
      const std::string& name = tokens_[std::size_t(id)];
      return text.compare(at, name.size(), name) == 0;
    });
    if (hit == specials_.end()) {
      ++at;
      continue;
    }
    encode_text(text.substr(begin, at - begin), &ids);
    ids.push_back(*hit);
    at += tokens_[std::size_t(*hit)].size();
    begin = at;
  }
  encode_text(text.substr(begin), &ids);
  return ids;
}

// The pattern of GPT-2, by hand:  's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// A number character ends the piece before it, so that (?!\S) does not see past it.
void Tokenizer::encode_text(std::string_view text, std::vector<int64_t>* ids) const {
  const std::vector<Character> all = characters(text);
  const std::size_t count = all.size();
  const auto offset = [&](std::size_t i) { return i < count ? all[i].begin : text.size(); };
  const auto run = [&](std::size_t i) {  // end of the run of characters of one kind that begins at i
    std::size_t end = i;
    while (end < count && all[end].kind == all[i].kind) ++end;
    return end;
  };
  for (std::size_t i = 0; i < count;) {
    std::size_t end = i + 1;
    if (all[i].kind != Kind::kNumber) {
      const std::size_t next = i + 1 < count && all[i + 1].kind != Kind::kNumber ? i + 1 : count;
      std::size_t contraction = 0;
      for (const std::string_view tail : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
        if (contraction == 0 && text.compare(offset(i), tail.size(), tail) == 0) contraction = tail.size();
      }
      if (contraction > 0) {
        end = i + contraction;  // ASCII: one byte a character
      } else if (all[i].kind != Kind::kSpace) {
        end = run(i);
      } else if (text[offset(i)] == ' ' && next < count && all[next].kind != Kind::kSpace) {
        end = run(next);
      } else {
        end = run(i);
        // White space before a word leaves its last character to the word.
        const bool word_follows = end < count && all[end].kind != Kind::kNumber;
        if (word_follows && end - i > 1) --end;
      }
    }
    encode_word(text.substr(offset(i), offset(end) - offset(i)), ids);
    i = end;
  }
}

void Tokenizer::encode_word(std::string_view word, std::vector<int64_t>* ids) const {
  std::vector<int32_t> parts;
  parts.reserve(word.size());
  for (const char c : word) {
    const int32_t token = byte_token_[static_cast<unsigned char>(c)];
    if (token >= 0) parts.push_back(token);
  }
  while (parts.size() > 1) {
    Merge best{INT32_MAX, -1};
    std::size_t where = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = merges_.find(pair_key(parts[i], parts[i + 1]));
      if (found != merges_.end() && found->second.rank < best.rank) {
        best = found->second;
        where = i;
      }
    }
    if (best.result < 0) break;
    parts[where] = best.result;
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(where) + 1);
  }
  ids->insert(ids->end(), parts.begin(), parts.end());
}

std::string Tokenizer::decode(const std::vector<int64_t>& ids) const {
  std::string text;
  for (const int64_t id : ids) text += tokens_.at(static_cast<std::size_t>(id));
  return text;
}

}  // namespace smollm2
