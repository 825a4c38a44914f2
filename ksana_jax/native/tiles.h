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

// sums[rows][64] (+)= a[rows, words] b[words, 64] for up to 16 rows, or with kTwo for 17 to 32.
template <bool kTwo>
void MultiplyTiles(const int32_t* a, int64_t stride, const int32_t* b, int64_t words, float* sums, bool accumulate) {
  constexpr int64_t kLine = 64 * sizeof(int32_t);
  constexpr int kAtOnce = kTwo ? 32 : 64;  // columns
  for (int c = 0; c < 64; c += kAtOnce) {
    // Sums 2 and 3 are of more rows, or of more columns.
    float *first = sums + c, *second = kTwo ? first + 16 * 64 : first + 32;
    if (accumulate) {
      _tile_loadd(0, first, kLine);
      _tile_loadd(1, first + 16, kLine);
      _tile_loadd(2, second, kLine);
      _tile_loadd(3, second + 16, kLine);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t w = 0; w < words; w += 16) {
      const int32_t* columns = b + w * 64 + c;
      _tile_loadd(4, a + w, stride * sizeof(int32_t));
      _tile_loadd(6, columns, kLine);
      _tile_loadd(7, columns + 16, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTwo) {
        _tile_loadd(5, a + 16 * stride + w, stride * sizeof(int32_t));
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_loadd(6, columns + 32, kLine);
        _tile_loadd(7, columns + 48, kLine);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
    _tile_stored(0, first, kLine);
    _tile_stored(1, first + 16, kLine);
    _tile_stored(2, second, kLine);
    _tile_stored(3, second + 16, kLine);
  }
}

// sums[rows][64] (+)= a[rows, words] b[words, 64], words of two bfloat16 in multiples of 16. A row of sums is the same
// whatever the other rows.
inline void MultiplyByTiles(const int32_t* a, int64_t stride, const int32_t* b, int64_t rows, int64_t words, float* sums,
                            bool accumulate) {
  for (int64_t sized = 0; rows > 0; rows -= 32, a += 32 * stride, sums += 32 * 64) {
    if (const int64_t some = rows < 32 ? rows : 32; some != sized) {
      SizeTiles(some > 16 ? 16 : some, some > 16 ? some - 16 : some);
      sized = some;
    }
    if (rows > 16) MultiplyTiles<true>(a, stride, b, words, sums, accumulate);
    else MultiplyTiles<false>(a, stride, b, words, sums, accumulate);
  }
  _tile_release();  // threads with registers in use take longer to switch
}

#else

constexpr bool HasTiles() { return false; }

inline void MultiplyByTiles(const int32_t*, int64_t, const int32_t*, int64_t, int64_t, float*, bool) {}

#endif

}  // namespace ksana
