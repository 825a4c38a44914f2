// Numbers as pools and queries store them, in float32 and back.
#pragma once

#include <cstdint>
#include <cstring>

namespace ksana {

#ifdef __aarch64__
using Half = __fp16;  // gcc 12 has no other name there
#else
using Half = _Float16;
#endif

enum Stored : int32_t { kFloat32, kBfloat16, kFloat16, kInt8, kPacked };

constexpr int64_t BytesOf(Stored stored) { return stored == kFloat32 ? 4 : stored >= kInt8 ? 1 : 2; }

inline float FromBfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

// Reads a vector of numbers, or codes without their scale.
inline void Widen(const void* from, int64_t n, Stored stored, float* to) {
  if (stored == kFloat32) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (stored == kBfloat16) {
    const auto* bits = static_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = FromBfloat16(bits[i]);
  } else if (stored == kFloat16) {
    const auto* halves = static_cast<const Half*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(halves[i]);
  } else {
    const auto* codes = static_cast<const int8_t*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(codes[i]);
  }
}

// Rounds a number to 16 bits, to nearest, ties to even.
inline uint16_t Narrow(float x, Stored stored) {
  uint16_t bits;
  if (stored == kFloat16) {
    const auto half = static_cast<Half>(x);
    std::memcpy(&bits, &half, sizeof(bits));
    return bits;
  }
  if (x != x) return 0x7fc0;
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof(wide));
  return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}

}  // namespace ksana
