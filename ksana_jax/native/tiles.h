// Products of bfloat16 by the matrix units of x86-64 (AMX), whose registers hold tiles of 16 x 16 words.
#pragma once

#include <cstdint>

// KSANA_HIDE hides AMX with AVX-512.
#if defined(__AMX_BF16__) && defined(__AVX512F__)
#define KSANA_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ksana {

constexpr int64_t kTile = 16;  // words

#ifdef KSANA_TILES

// True if the system gives this process the registers, for which it has to be asked once.
inline bool HasTiles() {
  constexpr int kRequest = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool has = syscall(SYS_arch_prctl, kRequest, kTiles) == 0;
  return has;
}

// Sizes of the eight registers: `first` rows in those of sums 0 and 1 and of factor 4, `second` in 2, 3 and 5.
inline void SizeTiles(int64_t first, int64_t second) {
  struct alignas(64) {
    uint8_t palette = 1, unused[15] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } sizes;
  const int64_t rows[] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; ++i) sizes.rows[i] = rows[i];
  _tile_loadconfig(&sizes);
}

// c[rows, columns] (+)= a[rows, words] b[words, columns] for up to 16 rows, or with kTwo for 17 to 32.
template <bool kTwo>
void MultiplyTiles(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                   int64_t words, int64_t columns, bool accumulate) {
  const int64_t of_a = a_stride * sizeof(*a), of_b = b_stride * sizeof(*b), of_c = c_stride * sizeof(*c);
  for (int64_t at = 0; at < columns; at += kTwo ? 32 : 64) {
    const bool has_more = kTwo || at + 64 <= columns;
    // Sums 2 and 3 are of more rows, or of more columns.
    float *sums = c + at, *more = kTwo ? sums + 16 * c_stride : sums + 32;
    if (accumulate) {
      _tile_loadd(0, sums, of_c);
      _tile_loadd(1, sums + 16, of_c);
      if (has_more) {
        _tile_loadd(2, more, of_c);
        _tile_loadd(3, more + 16, of_c);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t w = 0; w < words; w += kTile) {
      const int32_t* from = b + w * b_stride + at;
      _tile_loadd(4, a + w, of_a);
      _tile_loadd(6, from, of_b);
      _tile_loadd(7, from + 16, of_b);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTwo) {
        _tile_loadd(5, a + 16 * a_stride + w, of_a);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else if (has_more) {
        _tile_loadd(6, from + 32, of_b);
        _tile_loadd(7, from + 48, of_b);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
    _tile_stored(0, sums, of_c);
    _tile_stored(1, sums + 16, of_c);
    if (has_more) {
      _tile_stored(2, more, of_c);
      _tile_stored(3, more + 16, of_c);
    }
  }
}

// c[rows, columns] (+)= a[rows, words] b[words, columns], words of two bfloat16 in multiples of 16, columns in multiples
// of 32. A row of c is the same whatever the other rows.
inline void MultiplyByTiles(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, float* c,
                            int64_t c_stride, int64_t rows, int64_t words, int64_t columns, bool accumulate) {
  for (int64_t sized = 0; rows > 0; rows -= 32, a += 32 * a_stride, c += 32 * c_stride) {
    if (const int64_t some = rows < 32 ? rows : 32; some != sized) {
      SizeTiles(some > 16 ? 16 : some, some > 16 ? some - 16 : some);
      sized = some;
    }
    if (rows > 16) MultiplyTiles<true>(a, a_stride, b, b_stride, c, c_stride, words, columns, accumulate);
    else MultiplyTiles<false>(a, a_stride, b, b_stride, c, c_stride, words, columns, accumulate);
  }
  _tile_release();  // threads with registers in use take longer to switch
}

#else

constexpr bool HasTiles() { return false; }

inline void MultiplyByTiles(const int32_t*, int64_t, const int32_t*, int64_t, float*, int64_t, int64_t, int64_t, int64_t,
                            bool) {}

#endif

}  // namespace ksana
