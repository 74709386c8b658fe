// Byte-level BPE of SmolLM2: text to token ids and back. No torch.
//
// Text is cut into words in two stages: every single number character stands alone, then the pattern of GPT-2 cuts each
// remaining piece. The bytes of a word start as one token each and neighbours are merged, the pair that was learned
// first going first.
//
// Data (little-endian, written by export.py): "KIVITOK1"; u32 count and per token u8 special, u16 size, bytes; u32
// count and per merge u32 left, right, result, in the order learned; then for letters (\p{L}), numbers (\p{N}) and
// white space (\s) u32 count and per range of code points u32 first, last.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smollm2 {

class Tokenizer {
 public:
  // Throws std::runtime_error if the data is not what the comment above says.
  explicit Tokenizer(std::string_view data);

  // Tokens of UTF-8 text; a few bytes that text has no use for (some control characters) have no token and are left
  // out. With `special`, the names of special tokens such as <|im_end|> in the text become those tokens.
  std::vector<int64_t> encode(std::string_view text, bool special = true) const;
  // The bytes of the tokens; special tokens give their names. Throws std::out_of_range for an id outside the
  // vocabulary.
  std::string decode(const std::vector<int64_t>& ids) const;

  int64_t vocabulary_size() const { return static_cast<int64_t>(tokens_.size()); }

 private:
  using Ranges = std::vector<std::pair<uint32_t, uint32_t>>;
  enum class Kind { kLetter, kNumber, kSpace, kOther };
  struct Character {
    Kind kind;
    std::size_t begin;  // of its bytes in the text
  };
  struct Merge {
    int32_t rank;
    int32_t result;
  };

  Kind kind(uint32_t code_point) const;
  std::vector<Character> characters(std::string_view text) const;
  void encode_text(std::string_view text, std::vector<int64_t>* ids) const;
  void encode_word(std::string_view word, std::vector<int64_t>* ids) const;

  std::vector<std::string> tokens_;
  std::vector<int32_t> specials_;  // longest name first
  int32_t byte_token_[256];
  std::unordered_map<uint64_t, Merge> merges_;  // key: left << 32 | right
  Ranges letters_, numbers_, spaces_;
};

}  // namespace smollm2
