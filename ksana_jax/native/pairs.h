// Numbers of float32 and bfloat16 in vectors, as many neighbours at a time as two vectors hold.
#pragma once

#include <cstdint>
#include <cstring>

#include "product.h"
#include "simd.h"

namespace ksana {

struct Pair {
  Floats first, second;
};

inline Pair LoadPair(const float* from) { return {Load(from), Load(from + kLanes)}; }

inline Pair LoadPair(const uint16_t* from) {
  using Shorts = uint16_t __attribute__((vector_size(2 * kLanes)));
  using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
  Shorts halves[2];
  std::memcpy(halves, from, sizeof(halves));
  return {BitCast<Floats>(__builtin_convertvector(halves[0], Words) << 16),
          BitCast<Floats>(__builtin_convertvector(halves[1], Words) << 16)};
}

inline void StorePair(float* to, Pair x) {
  Store(to, x.first);
  Store(to + kLanes, x.second);
}

inline void StorePair(uint16_t* to, Pair x) {
  const Ints words = Bfloat16::Round(x.first, x.second);
  std::memcpy(to, &words, sizeof(words));
}

template <typename Number>
Pair LoadSome(const Number* from, int64_t count) {
  if (count >= 2 * kLanes) return LoadPair(from);
  Number padded[2 * kLanes] = {};
  std::memcpy(padded, from, count * sizeof(Number));
  return LoadPair(padded);
}

template <typename Number>
void StoreSome(Number* to, Pair x, int64_t count) {
  if (count >= 2 * kLanes) return StorePair(to, x);
  Number padded[2 * kLanes];
  StorePair(padded, x);
  std::memcpy(to, padded, count * sizeof(Number));
}

}  // namespace ksana
