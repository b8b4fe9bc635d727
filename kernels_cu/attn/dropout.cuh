// Dropout: a pure function of (seed, offset, score matrix t, row i, column j), the same for every kernel and tile.
//
// Philox4x32 with 7 rounds (Salmon et al. 2011). With I, a, g = i / 16, (i / 8) % 2, i % 8 and J, b, c, e = j / 16,
// (j / 8) % 2, (j % 8) / 2, j % 2, one call at counter (4 J + c, 8 I + g, t, offset) serves the eight elements that
// differ in a, b and e alone: a group. Element (a, b, e) has 16 bits e of word 2 a + b, and is kept iff they are
// below the threshold. cupyflash/dropout.py is the same in NumPy.
#pragma once
#include "attn/rows.cuh"

struct Words { u32 word[4]; };
constexpr u32 kFactor0 = 0xD2511F53u, kFactor1 = 0xCD9E8D57u, kKeyStep0 = 0x9E3779B9u, kKeyStep1 = 0xBB67AE85u;

CF_DEVICE Words philox_round(const Words& c, u32 key0, u32 key1) {
  const u64 x = u64(kFactor0) * c.word[0], y = u64(kFactor1) * c.word[2];
  return {{u32(y >> 32) ^ c.word[1] ^ key0, u32(y), u32(x >> 32) ^ c.word[3] ^ key1, u32(x)}};
}

CF_DEVICE Words philox4x32_7(Words counter, u32 key0, u32 key1) {
  CF_UNROLL
  for (int round = 0; round < 7; ++round) {
    counter = philox_round(counter, key0, key1);
    key0 += kKeyStep0;
    key1 += kKeyStep1;
  }
  return counter;
}

// At several counters in step: each round waits for the one before. The keys are of round kFrom, the first to be done.
template <int kFrom = 0, int kCount> CF_DEVICE void philox_in_step(Words (&counter)[kCount], u32 key0, u32 key1) {
  CF_UNROLL
  for (int round = kFrom; round < 7; ++round) {
    CF_UNROLL
    for (int n = 0; n < kCount; ++n) counter[n] = philox_round(counter[n], key0, key1);
    key0 += kKeyStep0;
    key1 += kKeyStep1;
  }
}

// The first three rounds, whose six products need not all be found for each call: one is the same for all, one depends on
// the row's word of the counter alone, three on the column's. What either gives, and what comes of both by the last product.
struct RowPart { u32 high, low; };

CF_DEVICE RowPart row_part(const Words& c, u32 key0, u32 key1) {
  const u64 y = u64(kFactor1) * c.word[2], x = u64(kFactor0) * (u32(y >> 32) ^ c.word[1] ^ key0);
  return {u32(x >> 32) ^ (key1 + kKeyStep1), u32(x)};
}

CF_DEVICE Words column_part(const Words& c, u32 key0, u32 key1) {
  const u64 x = u64(kFactor0) * c.word[0], y = u64(kFactor1) * (u32(x >> 32) ^ c.word[3] ^ key1);
  const u64 z = u64(kFactor0) * (u32(y >> 32) ^ kFactor1 * c.word[2] ^ (key0 + kKeyStep0));
  return {{u32(x), u32(y) ^ (key0 + 2 * kKeyStep0), u32(z >> 32) ^ (key1 + 2 * kKeyStep1), u32(z)}};
}

CF_DEVICE Words after_three_rounds(const RowPart& row, const Words& column) {
  const u64 y = u64(kFactor1) * (row.high ^ column.word[0]);
  return {{u32(y >> 32) ^ column.word[1], u32(y), column.word[2] ^ row.low, column.word[3]}};
}

struct DropoutStream {
  u32 key0, key1, t, offset, threshold;
  i64 origin_i, origin_j;      // added to rows and columns

  CF_DEVICE Words counter_of(u32 i, u32 j) const {
    return {{4 * (j / 16) + (j % 8) / 2, 8 * (i / 16) + i % 8, t, offset}};
  }
  CF_DEVICE Words words_of(u32 i, u32 j) const { return philox4x32_7(counter_of(i, j), key0, key1); }

  // Whether the groups of the whole matrix fall together with those of this shard: then `group` may be used.
  CF_DEVICE bool aligned() const { return (origin_i | origin_j) % 16 == 0; }

  // One element, by a Philox call of its own.
  CF_DEVICE bool kept(i32 row, i32 col) const {
    const u32 i = u32(row + origin_i), j = u32(col + origin_j);
    const Words words = words_of(i, j);
    const u32 a = (i / 8) % 2, b = (j / 8) % 2;
    const u32 word = a ? (b ? words.word[3] : words.word[2]) : (b ? words.word[1] : words.word[0]);
    return ((word >> (16 * (j % 2))) & 0xffffu) < threshold;
  }

  // The group whose element a = b = e = 0 is (row, col): bit 4 a + 2 b + e tells whether element (a, b, e) is kept.
  CF_DEVICE u32 group(i32 row, i32 col) const {
    const Words words = words_of(u32(row + origin_i), u32(col + origin_j));
    u32 bits = 0;
    CF_UNROLL
    for (int n = 0; n < 4; ++n) {
      bits |= u32((words.word[n] & 0xffffu) < threshold) << (2 * n);
      bits |= u32((words.word[n] >> 16) < threshold) << (2 * n + 1);
    }
    return bits;
  }
};

// Number t of a score matrix.
CF_DEVICE u32 matrix_number(const Params& p, const Item& item, i32 head) {
  return u32(item.number * p.heads_q + head + integer_at(p.call.dropout_t, p.call.dropout_t_value, p.dropout_t, item, head));
}

CF_DEVICE DropoutStream dropout_of(const Params& p, const Item& item, i32 head) {
  const Call& c = p.call;
  const u64 seed = integer_at(c.dropout_seed, i64(c.dropout_seed_value), p.dropout_seed, item, 0);
  const i64 offset = integer_at(c.dropout_offset, i64(c.dropout_offset_value), p.dropout_offset, item, 0);
  return {u32(seed), u32(seed >> 32), matrix_number(p, item, head), u32(offset), u32(c.dropout_threshold), c.dropout_origin_i,
          c.dropout_origin_j};
}

// What kept weights are multiplied by: exact for the probability that the threshold stands for.
template <class Score> CF_DEVICE Score dropout_scale(const Params& p) {
  return p.call.dropout_threshold == 0 ? Score(0) : Score(65536) / Score(p.call.dropout_threshold);
}
