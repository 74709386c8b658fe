// What the tensor-core kernel of attention_tensor_kernel.h knows at compile time: a record's layout, where a chunk of
// it stands in shared memory, and how codes are divided between the lanes of a warp.
//
// A warp takes chunks of 64 tokens. A chunk in shared memory (offsets are members of TensorFormat):
//
//   K codes   the lines of the record, 16-byte unit u of a record in the place u ^ (u / 8 % 2) * 2
//   K scale   [group][D]
//   V codes   plane by plane: [word of 16, 8 or 32 tokens][D] 32-bit words, 32 bytes between words
//   V scale   [channel group][64 tokens], then V zero likewise, rows `kVRow` bytes apart
//
// float16 scales and zeros come as they are; bytes lie in a section of their own and are expanded by the warp that
// needs them. K zeros are not copied: a warp reads them once, before its first chunk.
//
// Fragments of mma.m16n8k16 (lane: gid = lane / 4, tq = lane % 4). A has codes, B has q or weights, 8 query rows a
// tile.
//
//   K  rows of A = tokens, k = channels. One 16-byte load gives a lane one word of the tokens 4 gid .. 4 gid + 3 of 32.
//      Tile t (of 2), row gid + 8e is token 4 gid + 2t + e, so that a lane ends with the scores of four tokens that
//      follow one another.
//   V  rows of A = channels, k = tokens. One 16-byte load gives one word of the channels 4 gid .. 4 gid + 3 of 32; tile
//      t, row gid + 8e is channel 4 gid + 2t + e.
//   k  A word's neighbours 2i and 2i + 1 are one register of A (kivi/format.h), so a lane's share of k is a run of `n`
//      channels or tokens: [first + n tq, first + n tq + n) of 4n. A step of 16 takes two pairs of every lane.
//
// None of these loads has a bank conflict: the padding and the swizzle above are there for it.
#pragma once

#include <utility>

#include "cuda/device.h"
#include "kivi/format.h"

namespace kivi::cuda::tensor {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarpThreads;
inline constexpr int kChunk = 64;      // tokens that a warp takes at a time
inline constexpr int kUnit = 16;       // bytes of one copy
inline constexpr int kTileRows = 8;    // query rows of an MMA
inline constexpr int kMaxPages = 16;   // of a part, see parts.h
inline constexpr int kMaxGroups = 16;  // groups of K along the tokens that a warp may have in a part

// A class of key channels.
template <int Channels, int Bits>
struct Keys {
  static constexpr int kChannels = Channels, kBits = Bits;
};

// Four lanes' share of one class: channels [first, first + 4n), n for each lane. Plane p of a lane's codes is a word of
// which it has all, half or a quarter: 4, 2 or 1 words for the four.
struct KeyPiece {
  int bits = 0, first = 0, n = 0;
  int line[2] = {0, 0};   // of the record, of the first word for tokens 0 to 15
  int words[2] = {0, 0};  // lines to the next 16 tokens
};
// Words that four lanes share.
constexpr int shared_words(int plane_bits, int n) { return plane_bits * n / 8; }

// From where to where a 16-byte unit of a chunk goes, in bytes from the page's first record and from the chunk's place.
struct Move {
  int from = 0, to = 0;
  int record = 0;  // of the chunk's two if G = 32
};

// The record of TensorFormat below.
template <int D, int G, int ScaleBytes, int VBits, int VGroup, bool VSymmetric, class... Classes>
struct TensorRecord {
  static_assert(D % 16 == 0 && (G == 32 || G == 64 || G == 128) && (ScaleBytes == 1 || ScaleBytes == 2));
  static_assert(VBits >= 2 && VBits <= 4);

  static constexpr Format format() {
    Format f;
    f.num_kv_heads = 1, f.head_dim = f.value_head_dim = D, f.group_size = G;
    f.scale_type = ScaleBytes == 1 ? ScaleType::kFloat8 : ScaleType::kFloat16;
    const int channels[] = {Classes::kChannels...}, bits[] = {Classes::kBits...};
    constexpr int kCount = sizeof...(Classes);
    f.k_bits = 0;
    for (int c = 0; c < kCount; c++) {
      if (kCount > 1) f.key_classes[c] = {channels[c], bits[c]};
      if (bits[c] > f.k_bits) f.k_bits = bits[c];
    }
    f.num_key_classes = kCount > 1 ? kCount : 0;
    f.v_bits = VBits, f.v_group_size = VGroup == G ? 0 : VGroup, f.v_symmetric = VSymmetric;
    return f;
  }
  static constexpr RecordLayout layout() { return record_layout(format()); }

  // ---- pieces of K

  static constexpr int class_bits(int c) { return static_cast<int>(layout().key_classes[c].bits); }
  static constexpr int num_classes() { return static_cast<int>(layout().num_key_classes); }
  static constexpr int piece_channels(int bits, int left) {
    const int most = bits == 4 ? 32 : 64;
    return left >= most ? most : left >= 32 ? 32 : 16;
  }
  // Number `index`, or the count of all in `n`.
  static constexpr KeyPiece find_piece(int index) {
    int i = 0;
    for (int c = 0; c < num_classes(); c++) {
      const KeyClassLayout k = layout().key_classes[c];
      const int bits = static_cast<int>(k.bits), channels = static_cast<int>(k.channels);
      for (int at = 0; at < channels; i++) {
        const int size = piece_channels(bits, channels - at);
        if (i == index) {
          KeyPiece piece;
          piece.bits = bits, piece.first = static_cast<int>(k.first) + at, piece.n = size / 4;
          for (int p = 0; p < num_planes(bits); p++) {
            const int per_word = 32 / static_cast<int>(plane_bits(bits, p));
            piece.line[p] = static_cast<int>(k.codes[p] / kLineBytes) + at / per_word;
            piece.words[p] = static_cast<int>(k.words[p]);
          }
          return piece;
        }
        at += size;
      }
    }
    KeyPiece none;
    none.n = i;
    return none;
  }
  // The lowest slot whose lanes' addresses differ from this one's by a number of bytes that is the same for all lanes.
  static constexpr int address_of(int slot) {
    const KeyPiece a = find_piece(slot / 2);
    const int p = slot % 2;
    for (int other = 0; other < slot; other++) {
      const KeyPiece b = find_piece(other / 2);
      const int q = other % 2;
      if (q >= num_planes(b.bits)) continue;
      if (shared_words(static_cast<int>(plane_bits(a.bits, p)), a.n) ==
              shared_words(static_cast<int>(plane_bits(b.bits, q)), b.n) &&
          a.words[p] == b.words[q] && (a.line[p] - b.line[q]) % 4 == 0) {
        return other;
      }
    }
    return slot;
  }

  // Words of V in a chunk, for one channel.
  static constexpr int v_words(int plane) { return 2 * static_cast<int>(plane_bits(VBits, plane)); }
};

// D channels of K and V, groups of G tokens (32, 64, 128), ScaleBytes 1 (float8) or 2 (float16); classes of keys of 2,
// 3 or 4 bits. With G = 64 or 128 keys are one class.
template <int D, int G, int ScaleBytes, int VBits, int VGroup, bool VSymmetric, class... Classes>
struct TensorFormat : TensorRecord<D, G, ScaleBytes, VBits, VGroup, VSymmetric, Classes...> {
  using Record = TensorRecord<D, G, ScaleBytes, VBits, VGroup, VSymmetric, Classes...>;
  using Record::format, Record::layout, Record::find_piece, Record::num_classes, Record::v_words;

  static constexpr int kD = D, kG = G, kVBits = VBits, kVGroup = VGroup, kScaleBytes = ScaleBytes;
  static constexpr bool kVSymmetric = VSymmetric;
  static constexpr bool kSubnormalCodes = true;
  static constexpr int kKBits = static_cast<int>(format().k_bits);  // of the widest class
  static constexpr int kRecordBytes = static_cast<int>(layout().bytes);
  static constexpr int kRecords = G == 32 ? 2 : 1;  // of a chunk; with G = 128 half of one
  static constexpr int kKGroups = kRecords;         // groups of K along the tokens of a chunk
  static constexpr int kVGroups = static_cast<int>(layout().v_groups);
  static constexpr int kPairs = D / 8;  // pairs of channels that a lane has
  static constexpr int kVPlanes = num_planes(VBits);

  static constexpr int kPieces = find_piece(1 << 20).n;
  static constexpr int kPlaneSlots = 2 * kPieces;  // plane 0 and 1 of every piece

  // ---- a chunk in shared memory

  static constexpr int kKLines = static_cast<int>(layout().k_scale / kLineBytes);  // of a record
  static constexpr int kKChunkLines = G == 128 ? kKLines / 2 : kRecords * kKLines;
  static constexpr int kKRecordLines = kKChunkLines / kRecords;
  static_assert(G != 128 || (sizeof...(Classes) == 1 && kKBits != 3), "half a record of K is one run of lines");
  // From the first 32 tokens of a chunk to the second.
  static constexpr int kKHalfLines = G == 32 ? kKRecordLines : kKChunkLines / 2;
  static_assert(G == 32 || num_classes() == 1, "the second 32 tokens are at one distance");
  static_assert(G == 32 || kKHalfLines % 4 == 0, "both have one swizzle");

  static constexpr int kVStride = 4 * D + 32;  // from word to word
  static constexpr int kVRow = VBits == 4 ? 128 : 144;

  static constexpr int kKCodes = 0;
  static constexpr int kKScaleRaw = kKCodes + kKChunkLines * static_cast<int>(kLineBytes);
  static constexpr int kVCodes0 = kKScaleRaw + kKGroups * D * ScaleBytes;
  static constexpr int kVCodes1 = kVCodes0 + v_words(0) * kVStride;
  static constexpr int kVScaleRaw = kVCodes1 + (kVPlanes == 2 ? v_words(1) * kVStride : 0);
  static constexpr int kVSections = VSymmetric ? 1 : 2;
  static constexpr int kVRowsBytes = kVSections * kVGroups * kVRow;
  static constexpr int kStage =
      (kVScaleRaw + (ScaleBytes == 2 ? kVRowsBytes : kVSections * kVGroups * kChunk) + 31) / 32 * 32;
  // Bytes expanded to float16, once for a warp: K scales, V scales and zeros.
  static constexpr int kExpanded = ScaleBytes == 1 ? (kKGroups * D * 2 + kVRowsBytes + 15) / 16 * 16 : 0;

  // Eight tokens from `token` in row `g` of V scales. Words of 8 tokens: an odd row has the halves of the chunk
  // swapped, or lanes of two rows would meet in a bank.
  static constexpr int v_row_place(int g, int token) {
    return g * kVRow + (VBits == 4 ? token ^ (g % 2 * 32) : token) * 2;
  }

  // ---- what a lane loads: bytes from the chunk's place, or from that of its scales

  // One word each of the tokens 4 gid .. 4 gid + 3 of the first 32, for plane `slot % 2` of piece `slot / 2`.
  static constexpr int k_code_place(int slot, int lane) {
    const KeyPiece piece = find_piece(slot / 2);
    const int plane = slot % 2, gid = lane / 4, tq = lane % 4;
    const int words = shared_words(static_cast<int>(plane_bits(piece.bits, plane)), piece.n);
    const int line = piece.line[plane] + gid / 4 * piece.words[plane] + tq * words / 4;
    return kKCodes + line * 64 + (gid % 4 ^ line / 2 % 2 * 2) * 16;
  }
  // One word each of the channels 4 gid .. 4 gid + 3 of the first 32; two of a last 16 channels in half the bytes.
  static constexpr int v_code_place(int plane, int lane) {
    return plane == 0 ? kVCodes0 + lane % 4 * kVStride + lane / 4 * kUnit
                      : kVCodes1 + lane % 4 / 2 * kVStride + lane / 4 * kUnit;
  }
  // Scales of the lane's tokens in row g: the first 8 and the other 8. With words of 8 tokens those are in two records.
  static constexpr int v_row_part(int g, int lane, int part) {
    const int tq = lane % 4;
    return v_row_place(g, VBits == 4 ? 8 * tq + 32 * part : 16 * tq + 8 * part);
  }
  // Weights [row][token] of a warp. Rows are 144 bytes apart; with words of 8 tokens two rows of 128 and 32 bytes to
  // the next two, the halves of the second swapped.
  static constexpr int weight_place(int row, int token) {
    return VBits == 4 ? row / 2 * 288 + row % 2 * 128 + (token ^ row % 2 * 32) * 2 : row * 144 + token * 2;
  }
  static constexpr int weight_part(int lane, int part) {
    const int tq = lane % 4;
    return weight_place(lane / 4, VBits == 4 ? 8 * tq + 32 * part : 16 * tq + 8 * part);
  }

  // ---- copies of a chunk

  static constexpr int kKCodeUnits = kKChunkLines * 4;
  static constexpr int kKScaleUnits = kKGroups * D * ScaleBytes / kUnit;
  static constexpr int kVCodeUnits = (v_words(0) + (kVPlanes == 2 ? v_words(1) : 0)) * (D / 4);
  static constexpr int kVScaleUnits = kVSections * kVGroups * kChunk * ScaleBytes / kUnit;
  static constexpr int kUnits = kKCodeUnits + kKScaleUnits + kVCodeUnits + kVScaleUnits;
  static constexpr int kCopies = (kUnits + kWarpThreads - 1) / kWarpThreads;

  // `half`: which half of the page the chunk is.
  static constexpr Move move(int unit, int half) {
    constexpr RecordLayout kLayout = layout();
    const int start = G == 128 ? 0 : half * kRecords * kRecordBytes;
    Move m;
    if (unit < kKCodeUnits) {
      constexpr int kOfRecord = kKRecordLines * 4;
      const int u = unit % kOfRecord;
      m.record = unit / kOfRecord;
      m.from = start + m.record * kRecordBytes + u * kUnit + (G == 128 ? half * kKChunkLines * 64 : 0);
      m.to = kKCodes + (m.record * kOfRecord + (u ^ (u >> 3 & 1) << 1)) * kUnit;
      return m;
    }
    unit -= kKCodeUnits;
    if (unit < kKScaleUnits) {
      constexpr int kOfRecord = D * ScaleBytes / kUnit;
      m.record = unit / kOfRecord;
      m.from = start + m.record * kRecordBytes + static_cast<int>(kLayout.k_scale) + unit % kOfRecord * kUnit;
      m.to = kKScaleRaw + unit * kUnit;
      return m;
    }
    unit -= kKScaleUnits;
    if (unit < kVCodeUnits) {
      constexpr int kOfWord = D / 4;
      const int plane = unit < v_words(0) * kOfWord ? 0 : 1;
      if (plane == 1) unit -= v_words(0) * kOfWord;
      const int of_record = G * static_cast<int>(plane_bits(VBits, plane)) / 32;  // words
      const int word = unit / kOfWord, stored = word + (G == 128 ? half * v_words(plane) : 0);
      m.record = stored / of_record;
      m.from = start + m.record * kRecordBytes +
               static_cast<int>(plane == 0 ? kLayout.v_codes[0] : kLayout.v_codes[1]) +
               (stored % of_record * kOfWord + unit % kOfWord) * kUnit;
      m.to = (plane == 0 ? kVCodes0 : kVCodes1) + word * kVStride + unit % kOfWord * kUnit;
      return m;
    }
    unit -= kVCodeUnits;
    constexpr int kTokens = G < kChunk ? G : kChunk;  // of a record in the chunk
    constexpr int kPerUnit = kUnit / ScaleBytes;      // tokens
    constexpr int kOfRow = kTokens / kPerUnit, kOfSection = kVGroups * kOfRow, kOfRecord = kVSections * kOfSection;
    m.record = unit / kOfRecord;
    const int section = unit % kOfRecord / kOfSection, g = unit % kOfSection / kOfRow;
    const int token = unit % kOfRow * kPerUnit;
    m.from = start + m.record * kRecordBytes + static_cast<int>(section == 0 ? kLayout.v_scale : kLayout.v_zero) +
             (g * G + token + (G == 128 ? half * kChunk : 0)) * ScaleBytes;
    m.to = kVScaleRaw +
           (ScaleBytes == 2 ? section * kVGroups * kVRow + v_row_place(g, m.record * kTokens + token) : unit * kUnit);
    return m;
  }
  // Scales (section 0) or zeros of V as bytes: eight tokens of channel group g.
  static constexpr int v_raw_place(int section, int g, int token) {
    constexpr int kTokens = G < kChunk ? G : kChunk;
    return kVScaleRaw + ((token / kTokens * kVSections + section) * kVGroups + g) * kTokens + token % kTokens;
  }

  // Copy k moves unit 32k + lane. The first copy whose source, or target, differs from this one's by a number of bytes
  // that is the same for all lanes and halves.
  static constexpr int base_copy(int k, bool source) {
    for (int j = 0; j < k; j++) {
      if (same_distance(j, k, source)) return j;
    }
    return k;
  }
  static constexpr bool same_distance(int j, int k, bool source) {
    for (int half = 0; half < (source ? 2 : 1); half++) {
      for (int lane = 0; lane < kWarpThreads && 32 * k + lane < kUnits; lane++) {
        const Move a = move(32 * j + lane, half), b = move(32 * k + lane, half);
        if ((source ? b.from - a.from : b.to - a.to) != copy_distance(j, k, source)) return false;
      }
    }
    return true;
  }
  static constexpr int copy_distance(int j, int k, bool source) {
    const Move a = move(32 * j, 0), b = move(32 * k, 0);
    return source ? b.from - a.from : b.to - a.to;
  }
  // Registers that hold sources and targets.
  static constexpr int copy_addresses() {
    int count = 0;
    for (int k = 0; k < kCopies; k++) count += (base_copy(k, true) == k) + (base_copy(k, false) == k);
    return count;
  }
  // Whether a copy has units of the first record, and of the second.
  static constexpr bool has_record(int k, int record) {
    for (int unit = 32 * k; unit < 32 * k + kWarpThreads && unit < kUnits; unit++) {
      if (move(unit, 0).record == record) return true;
    }
    return false;
  }
};

// The same on a tensor core that takes subnormal float16 for 0: codes become normal numbers, with one more instruction
// for two.
template <class F>
struct NormalCodes : F {
  static constexpr bool kSubnormalCodes = false;
};

}  // namespace kivi::cuda::tensor
