// The operators that bindings.cc calls, without anything of XLA.
#pragma once

#include "job.h"
#include "norm.h"
#include "numbers.h"
#include "packed.h"
#include "recurrent.h"
#include "threads.h"

namespace ksana {

// y[T, N] = x[T, K] w[N, K]^T. Weights are stored as given, row after row.
struct Product {
  int64_t t, n, k;
  const char *x, *w;
  const float* scales;  // of rows of w, which then are codes; else null
  char* y;
  Stored asked;   // type of y
  int64_t parts;  // of a row of w that have a scale each, where codes are float8_e4m3fn; else 0
};

// Products of rows that are sorted by group, with a matrix for each: the first counts[0] rows with the first of w
// [groups, N, K]. Rows after the last group become zeros.
struct GroupedProduct {
  Product all;  // scales are [groups, N], or [groups, N, parts]
  int64_t groups;
  const int32_t* counts;
};

// Room for rows that are rounded to codes: as many as the widest has, [T, ...], and their scales [T]; or, with
// in_blocks, a `BlockOfRow` for each 32 codes.
struct Rounded {
  uint8_t* codes;
  float* scales;
  bool in_blocks;
};

// Up to three products of the same rows, with packed weights; with a norm before it if it has weights.
struct Projections {
  int64_t t;
  const char* x;  // [T, D]
  Norm norm;
  char* normed;  // [T, D] for the norm's results
  Rounded rounded;
  Packed w[3];
  char* y[3];    // [T, N of each]
  Stored asked;  // type of y
};

// Products of rows that are sorted by group, with packed matrices in blocks, one for each; as in `GroupedProduct`.
struct GroupedBlocks {
  int64_t t, groups;
  const int32_t* counts;
  const char* x;  // [T, K]
  Rounded rounded;
  Packed w;  // of the first group; others follow, array by array
  char* y;   // [T, N]
  Stored asked;
};

enum Activation : int32_t { kSilu, kGelu };

// Computes a layer after attention: r = x + norm(output attended); y = r + norm(down(act(gate m) up m)), m = norm(r).
struct Rest {
  int64_t t;
  const char *x, *attended;  // [T, D], [T, N H]
  Packed output, gate, up, down;
  Norm after_attention, before_mlp, after_mlp;
  Activation activation;
  char *y, *residual, *normed;  // [T, D]
  char* hidden;                 // [T, F]
  Rounded rounded;
};

void Attend(Call call, const Threads& threads);
void Linear(const Product& product, Stored stored, const Threads& threads);
void LinearOfGroups(const GroupedProduct& grouped, Stored stored, const Threads& threads);
template <typename Kind>  // Norm or LayerNorm
void NormRows(const Kind& norm, int64_t t, const char* x, char* y, Stored stored, const Threads& threads);
void BlocksOfGroups(const GroupedBlocks& grouped, Stored stored, const Threads& threads);
void Project(const Projections& projections, Stored stored, const Threads& threads);
void RunRest(const Rest& rest, Stored stored, const Threads& threads);
void Convolve(const ShortConv& conv, Stored stored, const Threads& threads);
void Recur(const Matrices& matrices, Stored stored, const Threads& threads);
void Zero(char* out, int64_t size);

}  // namespace ksana
