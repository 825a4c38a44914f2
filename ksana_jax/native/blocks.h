// Products with packed weights that are codes in blocks of 32 neighbours of a row, each with a scale, or one for each
// half. Rows of x are rounded to codes too, in the same blocks, and codes are multiplied exactly.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace ksana {

constexpr int64_t kBlock = 32, kRowsOfPanel = 64;

// A panel of a packed matrix [N, K] in blocks: its words [K / 32, bits, 64], their scales [K / 32 or K / 16, 64], with
// minima as many of them, and, if these are kInt8, factors in float16 [K / 256, 1 or, with minima, 2, 64].
struct Blocks {
  int bits = 0;              // of a code: 4, 5, 6 or 8; zero is in the middle, or at 0 with minima below 8
  bool in_halves = false;    // each half of a block has a scale
  bool has_minima = false;   // they are added to each number
  Stored stored = kFloat16;  // type of scales and minima: kFloat16, kFloat32 or kInt8

  int64_t WordBytes(int64_t k) const { return k / kBlock * bits * kRowsOfPanel * 4; }
  int64_t ScaleBytes(int64_t k) const { return k / (in_halves ? 16 : kBlock) * kRowsOfPanel * BytesOf(stored); }
  int64_t Bytes(int64_t k) const {
    const int64_t factors = stored == kInt8 ? k / 256 * kRowsOfPanel * 2 : 0;
    return WordBytes(k) + (has_minima ? 2 : 1) * (ScaleBytes(k) + factors);
  }
};

// Scale and sums of a block of a row of x.
struct BlockOfRow {
  float scale, sums[2];  // sums of the codes of each half
};

// Rounds a row to codes of -127 to 127; a scale is not finite if a number of its block is not.
void RoundToBlocks(const void* x, int64_t k, Stored stored, int8_t* codes, BlockOfRow* blocks);

// sums[rows][64] = x w^T for rows of x and a panel of weights, summed block after block, whatever the rows.
void MultiplyBlocks(const Blocks& w, const char* words, int64_t panel, int64_t k, const int8_t* codes,
                    const BlockOfRow* blocks, int64_t rows, float* sums);

}  // namespace ksana
