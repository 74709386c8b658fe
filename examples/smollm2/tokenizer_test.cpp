// Tests of the tokeniser.  tokenizer_test            rules and bad data, on a vocabulary of three letters
//                           tokenizer_test MODEL.pt   the real vocabulary, against tokens of the reference
//                           implementation
// Returns 77 (skipped) if MODEL.pt does not exist.
#include "tokenizer.h"

#include <caffe2/serialize/inline_container.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Ids = std::vector<int64_t>;
int failures = 0;

std::string print(const Ids& ids) {
  std::string text;
  for (const int64_t id : ids) text += std::to_string(id) + " ";
  return text;
}

void expect_ids(const std::string& what, const Ids& got, const Ids& expected) {
  if (got == expected) return;
  ++failures;
  std::printf("FAILED %s\n  expected %s\n  got      %s\n", what.c_str(), print(expected).c_str(), print(got).c_str());
}

void expect(const std::string& what, bool good) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

void expect_error(const std::string& what, const std::function<void()>& action, const std::string& part) {
  try {
    action();
  } catch (const std::exception& error) {
    return expect(what + ": message is '" + error.what() + "'",
                  std::string(error.what()).find(part) != std::string::npos);
  }
  expect(what + ": no error", false);
}

std::string number(uint32_t value, int bytes = 4) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 255);
  return out;
}

// 0 <s>, 1 a, 2 b, 3 space, 4 ', 5 digit 1, 6 "ab", 7 " ab", 8 "aa", 9 "<s>!" (special). Merges in order: a b, a a,
// space ab.
std::string small_data() {
  std::string data = "KIVITOK1" + number(10);
  const std::vector<std::pair<int, std::string>> tokens = {{1, "<s>"}, {0, "a"},  {0, "b"},   {0, " "},  {0, "'"},
                                                           {0, "1"},   {0, "ab"}, {0, " ab"}, {0, "aa"}, {1, "<s>!"}};
  for (const auto& [special, token] : tokens) {
    data += number(static_cast<uint32_t>(special), 1) + number(static_cast<uint32_t>(token.size()), 2) + token;
  }
  data += number(3);
  for (const uint32_t id : {1, 2, 6, 1, 1, 8, 3, 6, 7}) data += number(id);
  data += number(1) + number('a') + number('z');
  data += number(1) + number('0') + number('9');
  data += number(2) + number('\t') + number('\r') + number(' ') + number(' ');
  return data;
}

void test_small() {
  const std::string data = small_data();
  const smollm2::Tokenizer tokenizer(data);
  expect_ids("the pair learned first is merged first", tokenizer.encode("aab"), {1, 6});
  expect_ids("the left of two equal pairs is merged first", tokenizer.encode("aaa"), {8, 1});
  expect_ids("a word takes the space before it", tokenizer.encode("ab ab"), {6, 7});
  expect_ids("all but the last space stand alone", tokenizer.encode("  ab"), {3, 7});
  expect_ids("a number stands alone, without the space", tokenizer.encode("ab 1ab"), {6, 3, 5, 6});
  expect_ids("numbers are single", tokenizer.encode("11"), {5, 5});
  expect_ids("the longest special name wins", tokenizer.encode("a<s>!<s>a"), {1, 9, 0, 1});
  expect_ids("special names are text if so asked; bytes without a token are left out", tokenizer.encode("<s>a", false),
             {1});
  expect_ids("nothing", tokenizer.encode(""), {});
  expect("decode", tokenizer.decode({6, 7, 0}) == "ab ab<s>");
  expect_error(
      "id outside", [&] { tokenizer.decode({10}); }, "");
  expect_error(
      "wrong magic", [&] { smollm2::Tokenizer("KIVITOK2" + data.substr(8)); }, "KIVITOK1");
  expect_error(
      "one byte too many", [&] { smollm2::Tokenizer(data + "x"); }, "longer");
  for (std::size_t size = 8; size < data.size(); ++size) {
    expect_error(
        "cut at " + std::to_string(size), [&] { smollm2::Tokenizer(data.substr(0, size)); }, "ends too early");
  }
}

void test_real(const std::string& path) {
  caffe2::serialize::PyTorchStreamReader file(path);
  const auto [bytes, size] = file.getRecord("extra/tokenizer.bin");
  const smollm2::Tokenizer tokenizer(std::string(static_cast<const char*>(bytes.get()), size));
  expect("size of the vocabulary", tokenizer.vocabulary_size() == 49152);
  const std::vector<std::pair<std::string, Ids>> pairs = {
      {"Hello, world!", {19556, 28, 905, 17}},
      {"The year is 2024, and pi = 3.14159.",
       {504, 713, 314, 216, 34, 32, 34, 36, 28, 284, 16916, 446, 216, 35, 30, 33, 36, 33, 37, 41, 30}},
      {"  two  spaces\n\n\tand a tab\n", {216, 827, 216, 5600, 1116, 197, 397, 253, 10147, 198}},
      {"Gr\u00fc\u00dfe, caf\u00e9 \u2013 na\u00efve \U0001F600 \u65e5\u672c\u8a9e "
       "\u0395\u03bb\u03bb\u03ac\u03b4\u03b1",
       {27302, 7170,  34878, 85,  28,  37366, 816, 15486, 46494, 40303, 218,   17097, 241,
        115,   40993, 179,   120, 248, 5664,  239, 17162, 17162, 26112, 29589, 8998}},
      {"def f(x):\n    return x**2  # it's 10%\r\n",
       {1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 357, 506, 216, 33, 32, 21, 2738}},
      {"<|im_start|>user\nWhat's 12+30?<|im_end|>\n", {1, 4093, 198, 1780, 506, 216, 33, 34, 27, 35, 32, 47, 2, 198}},
      {"The capital of France is Paris.<|im_end|>", {504, 3575, 282, 4649, 314, 7042, 30, 2}},
  };
  for (const auto& [text, ids] : pairs) {
    expect_ids("encode " + text, tokenizer.encode(text), ids);
    expect("decode " + text, tokenizer.decode(ids) == text);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && !std::filesystem::exists(argv[1])) {
    std::printf("skipped: there is no file %s\n", argv[1]);
    return 77;
  }
  if (argc > 1) {
    test_real(argv[1]);
  } else {
    test_small();
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
