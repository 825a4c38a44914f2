// Recurrent layers: arguments of the operators in recurrent.cc.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace ksana {

// The texts of a step, whose tokens follow each other. Text r is absent if its last token is not its own. It
// continues text r - 1 if it reads the slot that the other one writes.
struct Texts {
  int64_t t, r;
  const int32_t* of_texts;   // [3, R]: the slots that a state is read from and written to; index of the last token
  const int32_t* of_tokens;  // [2, T]: text, and number of the text's tokens before this one

  int64_t Last(int64_t text) const { return of_texts[2 * r + text]; }
  int64_t Count(int64_t text) const {
    const int64_t last = Last(text);
    return of_tokens[last] == text ? of_tokens[t + last] + 1 : 0;
  }
  bool Continues(int64_t text, int64_t slots) const {
    const int64_t slot = of_texts[text];
    return text > 0 && slot >= 0 && slot < slots && slot == of_texts[r + text - 1];
  }
  bool IsPadding(int64_t token) const { return of_tokens[token] >= r; }
};

// The states of a layer in a pool [slots, layers, size]. A slot that does not exist stands for zeros, and is not written
// to.
template <typename Number>
struct StateSlots {
  Number* data;
  int64_t slots, layers, size, layer;

  Number* At(int64_t slot) const {
    return slot >= 0 && slot < slots ? data + (slot * layers + layer) * size : nullptr;
  }
};

// A gated convolution: y = gate conv(x).
struct ShortConv {
  Texts texts;
  int64_t d, kernel;
  const char *x, *gate;  // [T, D]: what is convolved, and what multiplies the result
  const char* taps;   // [D, kernel]
  const char* bias;   // [D], or null
  char* pool;         // states [kernel - 1, D]
  int64_t slots, layers, layer;
  char* y;  // [T, D]
};

// Layers with a matrix for each head, see `models.recurrent.Terms`.
struct Matrices {
  Texts texts;
  int64_t key_heads, heads, k, v, kernel;
  const char* given;     // [T, channels of all]: queries, keys and values before their convolution
  const char* taps[3];   // [channels of each, kernel]
  const char* bias;      // [channels of all], or null
  const float* decay;    // [T, heads, decay_channels]; a state is multiplied by it
  int64_t decay_channels;  // k, or 1 for one decay of a head
  const float* beta;       // [T, heads]
  const float* gate;       // [T, heads * v]
  const char* norm;        // [heads * v / groups], or with gate_first [heads * v]
  const float* skip;       // [heads], or null
  bool delta, gate_first, sigmoid;
  int64_t groups;  // of a row that are normalised
  float eps;
  char* conv_pool;     // states [kernel - 1, channels of all]
  float* matrix_pool;  // states [heads, k, v]
  int64_t slots, layers, layer;
  float *convolved, *read;  // room: [T, channels of all], [T, heads * v]
  char* y;                  // [T, heads * v]

  int64_t Channels(int part) const { return part == 2 ? heads * v : key_heads * k; }
  int64_t AllChannels() const { return 2 * key_heads * k + heads * v; }
};

}  // namespace ksana
