// The operators as custom calls of XLA, whose threads they use. Only this file knows XLA, whose header takes long to
// compile.

#include <cstring>

#include "calls.h"
#include "xla/ffi/api/ffi.h"

namespace ksana {
namespace {

namespace ffi = xla::ffi;

Threads Of(ffi::ThreadPool& pool) {
  return {pool.num_threads(), [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }};
}

const char* Data(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<const char*>(buffer.untyped_data()) : nullptr;
}

char* Data(ffi::Result<ffi::AnyBuffer>& buffer) { return static_cast<char*>(buffer->untyped_data()); }

ffi::Error NeitherType() {
  return ffi::Error::InvalidArgument("numbers that are neither float32 nor bfloat16");
}

bool IsEither(int32_t stored) { return stored == kFloat32 || stored == kBfloat16; }

template <typename Buffer>
auto* OrNull(Buffer& buffer) {
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

Vectors VectorsOf(const ffi::AnyBuffer& buffer, int32_t type, int64_t h) {
  const auto stored = static_cast<Stored>(type);
  return {Data(buffer), stored, h, static_cast<int64_t>(buffer.dimensions().back()) * BytesOf(stored)};
}

ffi::Error AttendCall(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv, ffi::AnyBuffer scales, ffi::AnyBuffer zeros,
                  ffi::Buffer<ffi::F32> levels, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> positions,
                  ffi::Buffer<ffi::S32> numbers, ffi::AnyBuffer q_sink, ffi::Buffer<ffi::F32> sinks,
                  ffi::Buffer<ffi::F32> factors, ffi::AnyBuffer rotated, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::Buffer<ffi::F32>> lse, ffi::Result<ffi::Buffer<ffi::F32>> mass, int32_t stored,
                  int32_t asked, float soft_cap) {
  const auto dims = q.dimensions(), of_pool = kv.dimensions();
  Call call{};
  call.s = dims[0], call.q = dims[1], call.n = dims[2], call.h = dims[3];
  call.l = of_pool[1], call.sides = of_pool[2], call.k = of_pool[3], call.b = of_pool[4];
  const auto of_tables = tables.dimensions();
  call.p = of_tables.back(), call.by_head = of_tables.size() == 3;
  call.j = q_sink.element_count() ? q_sink.dimensions()[2] : 0;
  if (call.h > 1024) return ffi::Error::InvalidArgument("head dim above 1024");
  call.queries = VectorsOf(q, asked, call.h);
  call.pool = VectorsOf(kv, stored, call.h);
  call.pool.scales = Data(scales), call.pool.zeros = Data(zeros), call.pool.levels = OrNull(levels);
  call.pool.scale_type = scales.element_type() == ffi::F16 ? kFloat16 : kFloat32;
  call.pool.bits = call.h ? 8 * call.pool.bytes / call.h : 0;
  call.pool.groups = scales.dimensions().size() == 6 ? scales.dimensions()[5] : 1;
  if (rotated.element_count()) {
    call.pool.rotated = reinterpret_cast<const uint16_t*>(Data(rotated));
    call.pool.num_rotated = rotated.dimensions().back();
  }
  call.tables = tables.typed_data();
  call.starts = starts.typed_data();
  call.positions = positions.typed_data();
  const int32_t* given = numbers.typed_data();
  call.layer = given[0];
  std::memcpy(&call.pattern, given + 1, sizeof(Pattern));
  call.sink_queries = VectorsOf(q_sink, asked, call.h);
  call.sinks = OrNull(sinks);
  call.soft_cap = soft_cap;
  call.factors = OrNull(factors);
  call.out = static_cast<char*>(out->untyped_data());
  call.lse = lse->typed_data();
  call.mass = OrNull(*mass);
  Attend(call, Of(pool));
  return ffi::Error::Success();
}

ffi::Error LinearCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales,
                      ffi::Result<ffi::AnyBuffer> y, int32_t stored, int32_t asked) {
  if (!IsEither(stored)) return NeitherType();
  Product p{};
  p.k = w.dimensions()[1], p.n = w.dimensions()[0], p.t = p.k ? x.element_count() / p.k : 0;
  p.x = Data(x), p.w = Data(w), p.scales = OrNull(scales), p.y = Data(y);
  p.asked = static_cast<Stored>(asked);
  p.parts = scales.dimensions().size() == 2 ? scales.dimensions()[1] : 0;
  Linear(p, static_cast<Stored>(stored), Of(pool));
  return ffi::Error::Success();
}

ffi::Error GroupedCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales,
                       ffi::Buffer<ffi::S32> counts, ffi::Result<ffi::AnyBuffer> y, int32_t stored, int32_t asked) {
  if (!IsEither(stored)) return NeitherType();
  GroupedProduct grouped{};
  Product& p = grouped.all;
  p.t = x.dimensions()[0], p.n = w.dimensions()[1], p.k = w.dimensions()[2];
  p.x = Data(x), p.w = Data(w), p.scales = OrNull(scales), p.y = Data(y);
  p.asked = static_cast<Stored>(asked);
  p.parts = scales.dimensions().size() == 3 ? scales.dimensions()[2] : 0;
  grouped.groups = w.dimensions()[0], grouped.counts = counts.typed_data();
  LinearOfGroups(grouped, static_cast<Stored>(stored), Of(pool));
  return ffi::Error::Success();
}

Norm NormOf(const ffi::AnyBuffer& weight, float eps, bool plus_one) {
  return {static_cast<int64_t>(weight.element_count()), Data(weight), eps, plus_one};
}

ffi::Error NormCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y,
                    int32_t stored, float eps, bool plus_one) {
  if (!IsEither(stored)) return NeitherType();
  const Norm norm = NormOf(weight, eps, plus_one);
  const int64_t t = norm.d ? x.element_count() / norm.d : 0;
  NormRows(norm, t, Data(x), Data(y), static_cast<Stored>(stored), Of(pool));
  return ffi::Error::Success();
}

ffi::Error LayerNormCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y,
                         int32_t stored, float eps) {
  if (!IsEither(stored)) return NeitherType();
  const auto shape = weight.dimensions();
  const LayerNorm norm{static_cast<int64_t>(shape.back()), Data(weight), shape.size() == 2, eps};
  const int64_t t = norm.d ? x.element_count() / norm.d : 0;
  NormRows(norm, t, Data(x), Data(y), static_cast<Stored>(stored), Of(pool));
  return ffi::Error::Success();
}

// A matrix is four arguments: words [N / 64, words along K, 64, numbers of a word], and, each [N] and where it has them,
// scales, sums of codes and bias. In blocks, it has bytes [N / 64, bytes of a panel], and a form; a stack of matrices has
// one axis more.
constexpr size_t kOfMatrix = 4, kOfForm = 4;

Packed PackedOf(const ffi::RemainingArgs& args, ffi::Span<const int32_t> forms, size_t i, int64_t n, int64_t k) {
  Packed w;
  const size_t at = kOfMatrix * i;
  w.n = n, w.k = k;
  w.words = Data(args.get<ffi::AnyBuffer>(at).value());
  const int32_t* form = forms.begin() + kOfForm * i;
  w.blocks = {form[0], form[1] != 0, form[2] != 0, static_cast<Stored>(form[3])};
  w.scales = reinterpret_cast<const float*>(Data(args.get<ffi::AnyBuffer>(at + 1).value()));
  w.sums = reinterpret_cast<const int32_t*>(Data(args.get<ffi::AnyBuffer>(at + 2).value()));
  w.bias = Data(args.get<ffi::AnyBuffer>(at + 3).value());
  return w;
}

// The slots of a call's rows: the first argument after its matrices, if it has adapters. A, B and gains of each matrix
// follow.
Slots SlotsOf(const ffi::RemainingArgs& args, size_t matrices, int64_t t) {
  const size_t at = kOfMatrix * matrices;
  if (args.size() <= at) return {};
  const int64_t num_slots = args.get<ffi::AnyBuffer>(at + 1).value().dimensions()[0];
  return {args.get<ffi::Buffer<ffi::S32>>(at).value().typed_data(), t, num_slots};
}

// The adapters of the i-th matrix; the last result, [matrices, T, R], is room for A x.
Adapters AdaptersOf(const ffi::RemainingArgs& args, size_t matrices, size_t i, const Slots& slots,
                    const ffi::RemainingRets& results) {
  if (!slots.of_row) return {};
  const size_t at = kOfMatrix * matrices + 1 + 3 * i;
  const auto a = args.get<ffi::AnyBuffer>(at).value();
  auto low = results.get<ffi::AnyBuffer>(results.size() - 1).value();
  const int64_t of_matrix = low->size_bytes() / matrices;
  return {&slots, a.dimensions()[0], a.dimensions()[2], Data(a), Data(args.get<ffi::AnyBuffer>(at + 1).value()),
          args.get<ffi::Buffer<ffi::F32>>(at + 2).value().typed_data(), Data(low) + i * of_matrix};
}

ffi::Error ProjectCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm, ffi::RemainingArgs matrices,
                       ffi::Result<ffi::AnyBuffer> normed, ffi::Result<ffi::Buffer<ffi::U8>> codes,
                       ffi::Result<ffi::Buffer<ffi::F32>> scales,
                       ffi::RemainingRets results, int32_t stored, int32_t asked, ffi::Span<const int32_t> forms,
                       float eps, bool plus_one) {
  if (!IsEither(stored)) return NeitherType();
  Projections p{};
  const int64_t k = x.dimensions().back();
  p.t = k ? x.element_count() / k : 0;
  p.x = Data(x), p.norm = NormOf(norm, eps, plus_one), p.normed = Data(normed);
  const size_t count = forms.size() / kOfForm;
  const Slots slots = SlotsOf(matrices, count, p.t);
  for (size_t i = 0; i < count; ++i) {
    auto y = results.get<ffi::AnyBuffer>(i).value();
    p.w[i] = PackedOf(matrices, forms, i, y->dimensions().back(), k);
    p.w[i].adapters = AdaptersOf(matrices, count, i, slots, results);
    p.y[i] = Data(y);
  }
  p.rounded = {codes->typed_data(), scales->typed_data(), p.w[0].blocks.bits != 0};
  p.asked = static_cast<Stored>(asked);
  Project(p, static_cast<Stored>(stored), Of(pool));
  return ffi::Error::Success();
}

ffi::Error GroupedBlocksCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> counts,
                             ffi::RemainingArgs matrix, ffi::Result<ffi::AnyBuffer> y,
                             ffi::Result<ffi::Buffer<ffi::U8>> codes, ffi::Result<ffi::Buffer<ffi::F32>> scales,
                             int32_t stored, int32_t asked, ffi::Span<const int32_t> forms) {
  if (!IsEither(stored)) return NeitherType();
  GroupedBlocks g{};
  g.t = x.dimensions()[0], g.groups = counts.element_count(), g.counts = counts.typed_data(), g.x = Data(x);
  g.rounded = {codes->typed_data(), scales->typed_data(), true};
  g.w = PackedOf(matrix, forms, 0, y->dimensions()[1], x.dimensions()[1]);
  g.y = Data(y), g.asked = static_cast<Stored>(asked);
  BlocksOfGroups(g, static_cast<Stored>(stored), Of(pool));
  return ffi::Error::Success();
}

ffi::Error RestCall(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer attended, ffi::AnyBuffer after_attention,
                    ffi::AnyBuffer before_mlp, ffi::AnyBuffer after_mlp, ffi::RemainingArgs matrices,
                    ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> residual,
                    ffi::Result<ffi::AnyBuffer> normed, ffi::Result<ffi::AnyBuffer> hidden,
                    ffi::Result<ffi::Buffer<ffi::U8>> codes, ffi::Result<ffi::Buffer<ffi::F32>> scales, ffi::RemainingRets results,
                    int32_t stored, int32_t activation, ffi::Span<const int32_t> forms, float eps, bool plus_one) {
  if (!IsEither(stored)) return NeitherType();
  const int64_t d = x.dimensions().back(), f = hidden->dimensions().back();
  Rest p{};
  p.t = d ? x.element_count() / d : 0;
  p.x = Data(x), p.attended = Data(attended);
  p.output = PackedOf(matrices, forms, 0, d, attended.dimensions().back());
  p.gate = PackedOf(matrices, forms, 1, f, d);
  p.up = PackedOf(matrices, forms, 2, f, d);
  p.down = PackedOf(matrices, forms, 3, d, f);
  const Slots slots = SlotsOf(matrices, 4, p.t);
  size_t i = 0;
  for (Packed* w : {&p.output, &p.gate, &p.up, &p.down}) w->adapters = AdaptersOf(matrices, 4, i++, slots, results);
  p.after_attention = NormOf(after_attention, eps, plus_one);
  p.before_mlp = NormOf(before_mlp, eps, plus_one);
  p.after_mlp = NormOf(after_mlp, eps, plus_one);
  p.activation = static_cast<Activation>(activation);
  p.y = Data(y), p.residual = Data(residual), p.normed = Data(normed), p.hidden = Data(hidden);
  p.rounded = {codes->typed_data(), scales->typed_data(), p.output.blocks.bits != 0};
  RunRest(p, static_cast<Stored>(stored), Of(pool));
  return ffi::Error::Success();
}

Texts TextsOf(const ffi::Buffer<ffi::S32>& of_texts, const ffi::Buffer<ffi::S32>& of_tokens) {
  return {static_cast<int64_t>(of_tokens.dimensions()[1]), static_cast<int64_t>(of_texts.dimensions()[1]),
          of_texts.typed_data(), of_tokens.typed_data()};
}

// Pools are changed in place: each is an argument and a result.
ffi::Error ShortConvCall(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer gate, ffi::AnyBuffer taps,
                         ffi::AnyBuffer bias, ffi::Buffer<ffi::S32> of_texts, ffi::Buffer<ffi::S32> of_tokens,
                         ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> pool,
                         int32_t stored) {
  if (!IsEither(stored)) return NeitherType();
  const auto dims = pool->dimensions();
  ShortConv s{};
  s.texts = TextsOf(of_texts, of_tokens);
  s.d = dims[3], s.kernel = dims[2] + 1, s.slots = dims[0], s.layers = dims[1], s.layer = *layer.typed_data();
  s.x = Data(x), s.gate = Data(gate), s.taps = Data(taps), s.bias = Data(bias), s.pool = Data(pool), s.y = Data(y);
  Convolve(s, static_cast<Stored>(stored), Of(threads));
  return ffi::Error::Success();
}

ffi::Error MatricesCall(ffi::ThreadPool threads, ffi::AnyBuffer given, ffi::AnyBuffer q_taps,
                        ffi::AnyBuffer k_taps, ffi::AnyBuffer v_taps, ffi::AnyBuffer bias,
                        ffi::Buffer<ffi::F32> decay, ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::F32> gate,
                        ffi::AnyBuffer norm, ffi::Buffer<ffi::F32> skip, ffi::Buffer<ffi::S32> of_texts,
                        ffi::Buffer<ffi::S32> of_tokens, ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer,
                        ffi::Buffer<ffi::F32>, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> convs,
                        ffi::Result<ffi::Buffer<ffi::F32>> matrices, ffi::Result<ffi::Buffer<ffi::F32>> convolved,
                        ffi::Result<ffi::Buffer<ffi::F32>> read, int32_t stored, int32_t groups, bool delta,
                        bool gate_first, bool sigmoid, float eps) {
  if (!IsEither(stored)) return NeitherType();
  const auto dims = matrices->dimensions();
  Matrices m{};
  m.texts = TextsOf(of_texts, of_tokens);
  const size_t last = dims.size() - 1;  // a pool has an axis of 1 before that of heads
  m.slots = dims[0], m.layers = dims[1], m.heads = dims[last - 2], m.k = dims[last - 1], m.v = dims[last];
  m.layer = *layer.typed_data(), m.kernel = convs->dimensions()[2] + 1, m.key_heads = (given.dimensions()[1] - m.heads * m.v) / (2 * m.k);
  m.given = Data(given);
  m.taps[0] = Data(q_taps), m.taps[1] = Data(k_taps), m.taps[2] = Data(v_taps), m.bias = Data(bias);
  m.decay = decay.typed_data(), m.decay_channels = decay.dimensions()[2], m.beta = beta.typed_data();
  m.gate = gate.typed_data(), m.norm = Data(norm), m.skip = OrNull(skip), m.groups = groups, m.eps = eps;
  m.delta = delta, m.gate_first = gate_first, m.sigmoid = sigmoid;
  m.conv_pool = Data(convs), m.matrix_pool = matrices->typed_data();
  m.convolved = convolved->typed_data(), m.read = read->typed_data(), m.y = Data(y);
  Recur(m, static_cast<Stored>(stored), Of(threads));
  return ffi::Error::Success();
}

ffi::Error ZerosCall(ffi::Result<ffi::AnyBuffer> out) {
  Zero(Data(out), out->size_bytes());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace ksana

// The instruction sets that products are compiled for.
extern "C" const char* ksana_instructions() {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  return "AVX-512 with BF16 and VNNI";
#elif defined(__AVX512VNNI__)
  return "AVX-512 with VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVXVNNI__) && defined(__FMA__)
  return "AVX2 with FMA and VNNI";
#elif defined(__AVX2__) && defined(__FMA__)
  return "AVX2 with FMA";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON with dot products";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "none";
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_attend, ksana::AttendCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()                     // q
                                  .Arg<ksana::ffi::AnyBuffer>()                     // kv
                                  .Arg<ksana::ffi::AnyBuffer>()                     // scales
                                  .Arg<ksana::ffi::AnyBuffer>()                     // zeros
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()       // levels
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // tables
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // starts
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // positions
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()       // layer, pattern
                                  .Arg<ksana::ffi::AnyBuffer>()                     // q_sink
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()       // sinks
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()       // mass_factor
                                  .Arg<ksana::ffi::AnyBuffer>()                     // rotated
                                  .Ret<ksana::ffi::AnyBuffer>()                     // out
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()       // lse
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()       // mass
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_linear, ksana::LinearCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()                // x
                                  .Arg<ksana::ffi::AnyBuffer>()                // w
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // scales
                                  .Ret<ksana::ffi::AnyBuffer>()                // y
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_grouped_linear, ksana::GroupedCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()                // x
                                  .Arg<ksana::ffi::AnyBuffer>()                // w
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // scales
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // counts
                                  .Ret<ksana::ffi::AnyBuffer>()                // y
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_rms_norm, ksana::NormCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()  // x
                                  .Arg<ksana::ffi::AnyBuffer>()  // weight
                                  .Ret<ksana::ffi::AnyBuffer>()  // y
                                  .Attr<int32_t>("stored")
                                  .Attr<float>("eps")
                                  .Attr<bool>("plus_one"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_layer_norm, ksana::LayerNormCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()  // x
                                  .Arg<ksana::ffi::AnyBuffer>()  // weight
                                  .Ret<ksana::ffi::AnyBuffer>()  // y
                                  .Attr<int32_t>("stored")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_project, ksana::ProjectCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()  // x
                                  .Arg<ksana::ffi::AnyBuffer>()  // weight of the norm
                                  .RemainingArgs()               // matrices, and their adapters
                                  .Ret<ksana::ffi::AnyBuffer>()  // normed
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::U8>>()   // codes of x
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()  // and their scales
                                  .RemainingRets()               // y of each, and A x of adapters
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked")
                                  .Attr<ksana::ffi::Span<const int32_t>>("forms")
                                  .Attr<float>("eps")
                                  .Attr<bool>("plus_one"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_grouped_blocks, ksana::GroupedBlocksCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()                // x
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // counts
                                  .RemainingArgs()                             // the matrices
                                  .Ret<ksana::ffi::AnyBuffer>()                // y
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::U8>>()   // codes of x
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()  // and their scales
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("asked")
                                  .Attr<ksana::ffi::Span<const int32_t>>("forms"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_rest_of_layer, ksana::RestCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()  // x
                                  .Arg<ksana::ffi::AnyBuffer>()  // attended
                                  .Arg<ksana::ffi::AnyBuffer>()  // norms after attention, before and after the MLP
                                  .Arg<ksana::ffi::AnyBuffer>()
                                  .Arg<ksana::ffi::AnyBuffer>()
                                  .RemainingArgs()               // matrices: output, gate, up, down, and adapters
                                  .Ret<ksana::ffi::AnyBuffer>()  // y
                                  .Ret<ksana::ffi::AnyBuffer>()  // residual
                                  .Ret<ksana::ffi::AnyBuffer>()  // normed
                                  .Ret<ksana::ffi::AnyBuffer>()  // hidden
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::U8>>()   // codes of factors
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()  // and their scales
                                  .RemainingRets()               // A x of adapters
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("activation")
                                  .Attr<ksana::ffi::Span<const int32_t>>("forms")
                                  .Attr<float>("eps")
                                  .Attr<bool>("plus_one"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_short_conv, ksana::ShortConvCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()                // x
                                  .Arg<ksana::ffi::AnyBuffer>()                // gate
                                  .Arg<ksana::ffi::AnyBuffer>()                // taps
                                  .Arg<ksana::ffi::AnyBuffer>()                // bias
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // of texts
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // of tokens
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // layer
                                  .Arg<ksana::ffi::AnyBuffer>()                // pool of inputs
                                  .Ret<ksana::ffi::AnyBuffer>()                // y
                                  .Ret<ksana::ffi::AnyBuffer>()                // pool of inputs
                                  .Attr<int32_t>("stored"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_recur, ksana::MatricesCall,
                              ksana::ffi::Ffi::Bind()
                                  .Ctx<ksana::ffi::ThreadPool>()
                                  .Arg<ksana::ffi::AnyBuffer>()                // queries, keys and values
                                  .Arg<ksana::ffi::AnyBuffer>()                // their taps
                                  .Arg<ksana::ffi::AnyBuffer>()
                                  .Arg<ksana::ffi::AnyBuffer>()
                                  .Arg<ksana::ffi::AnyBuffer>()                // bias of all
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // decay
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // beta
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // gate
                                  .Arg<ksana::ffi::AnyBuffer>()                // weight of the norm
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // skip
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // of texts
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // of tokens
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::S32>>()  // layer
                                  .Arg<ksana::ffi::AnyBuffer>()                // pool of inputs
                                  .Arg<ksana::ffi::Buffer<ksana::ffi::F32>>()  // pool of matrices
                                  .Ret<ksana::ffi::AnyBuffer>()                // y
                                  .Ret<ksana::ffi::AnyBuffer>()                // pools
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()  // room for what is convolved
                                  .Ret<ksana::ffi::Buffer<ksana::ffi::F32>>()  // and read
                                  .Attr<int32_t>("stored")
                                  .Attr<int32_t>("groups")
                                  .Attr<bool>("delta")
                                  .Attr<bool>("gate_first")
                                  .Attr<bool>("sigmoid")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ksana_zeros, ksana::ZerosCall, ksana::ffi::Ffi::Bind().Ret<ksana::ffi::AnyBuffer>());
