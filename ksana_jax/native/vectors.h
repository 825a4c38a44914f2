// Vectors of H numbers, as pools and queries store them: numbers, or codes with scales.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "simd.h"

namespace ksana {

struct Vectors {
  const char* data = nullptr;
  Stored stored = kFloat32;
  int64_t h = 0, bytes = 0;  // of a vector
  // A number is its code, or the level of its packed code, times a scale plus a zero of its group of H / groups numbers.
  const char *scales = nullptr, *zeros = nullptr;  // [vectors, groups], or null
  Stored scale_type = kFloat32;                    // of zeros too
  int64_t groups = 1;
  int64_t bits = 0;               // of packed codes
  const float* levels = nullptr;  // [16]: their levels, repeated
  // Bfloat16 [vectors, num_rotated], or null. Codes are of the other numbers, whose groups have a multiple of 32.
  const uint16_t* rotated = nullptr;
  int64_t num_rotated = 0;

  const char* At(int64_t vector) const { return data + vector * bytes; }

  // Decodes a vector to float32. `to` has room for whole registers.
  void Read(int64_t vector, float* to) const {
    if (rotated != nullptr) return ReadHalves(vector, to);
    const char* from = At(vector);
    if (stored != kPacked) Widen(from, h, stored, to);
    else if (bits == 4) Unpack<4>(from, to);
    else if (bits == 3) Unpack<3>(from, to);
    else Unpack<2>(from, to);
    if (scales == nullptr) return;
    const int64_t size = h / groups, at = vector * groups;
    for (int64_t g = 0; g < groups; ++g, to += size) {
      const float scale = Parameter(scales, at + g), zero = zeros ? Parameter(zeros, at + g) : 0.0f;
      for (int64_t d = 0; d < size; ++d) to[d] = to[d] * scale + zero;
    }
  }

 private:
  // Decodes half of the rotated numbers, half of the others, and the other halves.
  void ReadHalves(int64_t vector, float* to) const {
    const int64_t others = h - num_rotated, of_half = num_rotated / 2;
    const auto* codes = reinterpret_cast<const int8_t*>(At(vector));
    const float* of_groups = reinterpret_cast<const float*>(scales) + vector * groups;
    for (int64_t half = 0, i = 0; half < 2; ++half) {
      Widen(rotated + vector * num_rotated + half * of_half, of_half, kBfloat16, to);
      to += of_half;
      for (; i < (half + 1) * others / 2; i += kLanes, to += kLanes)
        Store(to, FromCodes(codes + i) * of_groups[i * groups / others]);
    }
  }

  float Parameter(const char* array, int64_t i) const {
    float x;
    Widen(array + i * BytesOf(scale_type), 1, scale_type, &x);
    return x;
  }

  template <int kBits>
  void Unpack(const char* from, float* to) const {
    const float* table = levels;
    const int64_t n = h;
    int64_t d = 0;
    for (; d + kLanes <= n; d += kLanes) Store(to + d, Lookup(table, Codes<kBits>(from, d)));
    if (d == n) return;
    char rest[8] = {};
    std::memcpy(rest, from + d / 8 * kBits, bytes - d / 8 * kBits);
    Store(to + d, Lookup(table, Codes<kBits>(rest, d % 8)));
  }

  // Returns codes d to d + kLanes in the lowest bits of the lanes. Eight codes are kBits bytes.
  template <int kBits>
  static Ints Codes(const char* from, int64_t d) {
    Ints words, shifts;
    for (int i = 0; i < kLanes; ++i) shifts[i] = i % 8 * kBits;
    words = Ints{} + Word<kBits>(from + d / 8 * kBits);
    if constexpr (kLanes == 16) {
      Ints second;
      for (int i = 0; i < kLanes; ++i) second[i] = i < 8 ? 0 : -1;
      words = second ? Ints{} + Word<kBits>(from + (d / 8 + 1) * kBits) : words;
    }
    return words >> (kLanes < 8 ? shifts + static_cast<int32_t>(d % 8 * kBits) : shifts);
  }

  template <int kBits>
  static int32_t Word(const char* from) {
    int32_t word = 0;
    std::memcpy(&word, from, kBits);
    return word;
  }
};

}  // namespace ksana
