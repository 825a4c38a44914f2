// Products with packed weights that are codes in blocks of 32 neighbours of a row, each with a scale. Rows of x are
// rounded to codes too, in the same blocks, and codes are multiplied exactly.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace ksana {

constexpr int64_t kBlock = 32;

// What a packed matrix has in place of a scale for each row; float16, [N / 64, K / 32, 64].
struct Blocks {
  const uint16_t* scales = nullptr;
  const uint16_t* minima = nullptr;  // added to each number; or null
  bool in_bytes = false;             // codes have 8 bits, in which 128 is zero; or 4, in which 8 is, without minima
};

// Of a block of a row of x.
struct BlockOfRow {
  float scale, sum;  // the sum of its codes
};

// Rounds a row to codes of -127 to 127; a scale is not finite if a number of its block is not.
void RoundToBlocks(const void* x, int64_t k, Stored stored, int8_t* codes, BlockOfRow* blocks);

// sums[rows][64] = x w^T for rows of x and a panel of weights, summed block after block, whatever the rows.
void MultiplyBlocks(const Blocks& w, const char* words, int64_t panel, int64_t k, const int8_t* codes,
                    const BlockOfRow* blocks, int64_t rows, float* sums);

}  // namespace ksana
