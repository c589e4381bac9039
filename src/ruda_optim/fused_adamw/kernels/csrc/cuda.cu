// Load, loop, store: the CUDA kernels. The arithmetic is in adamw_update.h and the headers beside it, which the CPU
// operator compiles too. nvrtc/compiler.py compiles one instance at a time, with contraction off; tools/fused_adamw/host_simulator
// compiles this file unchanged for the CPU.
#include "adamw_update.h"
#include "cuda_memory.h"
#include "gradient_stats.h"
#include "half_bits.h"
#include "moments.h"

namespace ruda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Blocks per multiprocessor that the registers must allow. Left to itself the compiler spills, or takes more than it needs.
constexpr int kUpdateBlocks = 4;
constexpr int kGeneralBlocks = 2;

// ---- update ----------------------------------------------------------------------------------------------------------

template <int W, class Word>
__device__ Pack<Word, W> load_moment(bool first, const Word* p) {
  if (first) return {};  // the memory holds nothing yet
  return load<W>(p);
}

// How moments are stored, by number. All tensors of a launch have one form.
template <int MOMENTS>
struct Form;
template <>
struct Form<0> : Fp32Moments {};
template <>
struct Form<1> : Bf16Moments {};
template <>
struct Form<2> : PackedMoments {};

// Template arguments of an update instance: kAny decides per tensor, at run time. The instance that is kAny throughout also
// serves strided tensors and first steps; the others leave them out, so that their loops hold nothing but the loop.
constexpr int kAny = -1;
enum Gradient { kFloat, kHalf, kBrain };
enum Store { kPlain, kWithHalf, kWithBrain, kSplitMaster };

template <int GRADIENT, int STORE, int AMSGRAD>
struct Variant {
  long long flags;
  static constexpr bool kGeneral = GRADIENT == kAny && STORE == kAny && AMSGRAD == kAny;

  __device__ bool half_gradient() const { return GRADIENT == kAny ? flags & kGradFp16 : GRADIENT == kHalf; }
  __device__ bool brain_gradient() const { return GRADIENT == kAny ? flags & kGradBf16 : GRADIENT == kBrain; }
  __device__ int gradient_bytes() const { return half_gradient() || brain_gradient() ? 2 : 4; }
  __device__ bool half_copy() const { return STORE == kAny ? flags & kCopyFp16 : STORE == kWithHalf; }
  __device__ bool brain_copy() const { return STORE == kAny ? flags & kCopyBf16 : STORE == kWithBrain; }
  __device__ bool split() const { return STORE == kAny ? flags & kSplit : STORE == kSplitMaster; }
  __device__ bool amsgrad() const { return AMSGRAD == kAny ? flags & kAmsgrad : AMSGRAD == 1; }
  __device__ bool first() const { return kGeneral && (flags & kFirst); }
  __device__ bool strided() const { return kGeneral && (flags & kStrided); }
  __device__ bool aligned() const { return flags & kAligned; }
};

template <class Word>
struct Memory {
  const Piece& piece;
  const void* gradient;
  const float* p;
  const Word *m, *v, *v_max;
  u16 *copy, *remainder;

  __device__ explicit Memory(const Piece& whole)
      : piece(whole),
        gradient(piece.pointer<const void>(kGrad)),
        p(piece.pointer<const float>(kParam)),
        m(piece.pointer<const Word>(kExpAvg)),
        v(piece.pointer<const Word>(kExpAvgSq)),
        v_max(piece.pointer<const Word>(kMaxExpAvgSq)),
        copy(piece.pointer<u16>(kCopy)),
        remainder(piece.pointer<u16>(kRemainder)) {}

  template <class T>
  __device__ T* out(Field field) const {
    return piece.pointer<T>(field);
  }
};

template <int W, class V>
__device__ Pack<float, W> load_gradient(const V& variant, const void* gradient, long long offset) {
  Pack<float, W> g;
  if (variant.half_gradient() || variant.brain_gradient()) {
    const Pack<u16, W> stored = load<W>(static_cast<const u16*>(gradient) + offset);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      g.x[j] = variant.half_gradient() ? float_from_fp16(stored.x[j]) : float_from_bf16(stored.x[j]);
    }
  } else {
    g = load<W>(static_cast<const float*>(gradient) + offset);
  }
  return g;
}

template <int W, class Form, class V, class Offsets>
__device__ void update_elements(const V& variant, const Memory<typename Form::Word>& memory, const Offsets& at,
                                const Coefficients& c, const GradientFactors& f, unsigned seed) {
  using Word = typename Form::Word;
  const Pack<float, W> g = load_gradient<W>(variant, memory.gradient, at[kRoleGrad]);
  Pack<float, W> p;
  if (variant.split()) {
    const Pack<u16, W> high = load<W>(memory.copy + at[kRoleCopy]);
    const Pack<u16, W> low = load<W>(memory.remainder + at[kRoleRemainder]);
#pragma unroll
    for (int j = 0; j < W; ++j) p.x[j] = join_master({high.x[j], low.x[j]});
  } else {
    p = load<W>(memory.p + at[kRoleParam]);
    if (variant.half_copy()) {
      const Pack<u16, W> written = load<W>(memory.copy + at[kRoleCopy]);
#pragma unroll
      for (int j = 0; j < W; ++j) p.x[j] = follow_fp16(p.x[j], written.x[j]);
    } else if (variant.brain_copy()) {
      const Pack<u16, W> written = load<W>(memory.copy + at[kRoleCopy]);
#pragma unroll
      for (int j = 0; j < W; ++j) p.x[j] = follow_bf16(p.x[j], written.x[j]);
    }
  }
  Pack<Word, W> m = load_moment<W>(variant.first(), memory.m + at[kRoleExpAvg]), v{}, v_max{};
  if (!Form::kPacked) v = load_moment<W>(variant.first(), memory.v + at[kRoleExpAvgSq]);
  if (variant.amsgrad()) v_max = load_moment<W>(variant.first(), memory.v_max + at[kRoleMaxExpAvgSq]);

#pragma unroll
  for (int j = 0; j < W; ++j) {
    Words<Word> words{m.x[j], v.x[j], v_max.x[j]};
    p.x[j] = variant.amsgrad() ? update_element<Form, true>(c, f, seed, g.x[j], p.x[j], words)
                               : update_element<Form, false>(c, f, seed, g.x[j], p.x[j], words);
    m.x[j] = words.m;
    v.x[j] = words.v;
    v_max.x[j] = words.v_max;
  }

  // The output pointers are read here, from the cache, each time: kept through the loop they would take eight registers more,
  // enough to spill on sm_100. The empty instruction keeps the compiler from moving the reads out of the loop.
  asm volatile("" ::: "memory");
  store(memory.template out<Word>(kExpAvgOut) + at[kRoleExpAvg], m);
  if (!Form::kPacked) store(memory.template out<Word>(kExpAvgSqOut) + at[kRoleExpAvgSq], v);
  if (variant.amsgrad()) store(memory.template out<Word>(kMaxExpAvgSqOut) + at[kRoleMaxExpAvgSq], v_max);
  if (variant.split()) {
    Pack<u16, W> high, low;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const SplitMaster master = split_master(p.x[j]);
      high.x[j] = master.high;
      low.x[j] = master.remainder;
    }
    store(memory.copy + at[kRoleCopy], high);
    store(memory.remainder + at[kRoleRemainder], low);
    return;
  }
  store(memory.template out<float>(kParamOut) + at[kRoleParam], p);
  if (variant.half_copy() || variant.brain_copy()) {
    Pack<u16, W> copy;
#pragma unroll
    for (int j = 0; j < W; ++j) copy.x[j] = variant.half_copy() ? fp16_from_float(p.x[j]) : bf16_from_float(p.x[j]);
    store(memory.copy + at[kRoleCopy], copy);
  }
}

// One block per chunk. `decision` is (skip, clip factor, inverse scale, 0). Tensor i takes row kCoefficientRow of
// `coefficients`, or row i if `decide` wrote them.
template <int GRADIENT, int STORE, int AMSGRAD, int MOMENTS>
__global__ void __launch_bounds__(kThreads, GRADIENT == kAny ? kGeneralBlocks : kUpdateBlocks)
    update(const long long* fields, const long long* layouts, const long long* blocks, long long count,
           const Coefficients* coefficients, const float* decision, int row_per_tensor) {
  if (decision[0] != 0.0f) return;
  const Piece piece(Table{fields, layouts, blocks, count}, blockIdx.x);
  const Variant<GRADIENT, STORE, AMSGRAD> variant{piece.at(kFlags)};
  const Memory<typename Form<MOMENTS>::Word> memory(piece);
  const Coefficients c = coefficients[row_per_tensor ? piece.tensor : piece.at(kCoefficientRow)];
  const GradientFactors f = gradient_factors(c, decision[2], decision[1]);
  const unsigned seed = seed_of(c);
  const int thread = static_cast<int>(threadIdx.x);

  if (variant.strided()) {
#pragma unroll 1
    for (int i = thread; i < piece.size; i += kThreads) {
      update_elements<1, Form<MOMENTS>>(variant, memory, Strided(piece.layout, piece.begin + i), c, f, seed);
    }
    return;
  }
  // Four elements are 16 bytes of FP32; eight are 16 bytes where all memory is 16 bits wide, unless that needs too many
  // registers. What lies before and after whole packs goes one by one, as does a tensor whose arrays lie differently.
  constexpr bool kNarrow = MOMENTS != 0 && GRADIENT > kFloat && STORE == kSplitMaster;
  constexpr int kWidth = kNarrow && AMSGRAD == 0 ? 8 : 4;
  const int head = variant.aligned() ? 0
                                     : elements_before_boundary<kWidth>(piece, variant.gradient_bytes(),
                                                                        sizeof(typename Form<MOMENTS>::Word));
  const int packed = (piece.size - head) / kWidth * kWidth;
#pragma unroll 1
  for (int i = head + thread * kWidth; i < head + packed; i += kThreads * kWidth) {
    update_elements<kWidth, Form<MOMENTS>>(variant, memory, Flat{piece.begin + i}, c, f, seed);
  }
#pragma unroll 1
  for (int i = thread; i < piece.size - packed; i += kThreads) {
    const int at = i < head ? i : packed + i;
    update_elements<1, Form<MOMENTS>>(variant, memory, Flat{piece.begin + at}, c, f, seed);
  }
}

// ---- reductions over a block, in a fixed order -----------------------------------------------------------------------

struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct Plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Every thread gets the result. `partial` holds one value per warp and serves one reduction only.
template <class T, class Combine>
__device__ T reduce_block(T x, T* partial, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = partial[threadIdx.x % kWarps];
#pragma unroll
  for (int distance = kWarps / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// ---- gradient statistics ---------------------------------------------------------------------------------------------

constexpr int kPerThread = kChunk / kThreads;

// One thread's gradients of a chunk, unscaled. An aligned whole chunk is read once, in 128-bit loads, and stays in registers.
// Anything else is read again for each pass, element by element.
template <int GRADIENT>
struct Share {
  const Piece& piece;
  const Variant<GRADIENT, kAny, kAny> variant;
  const void* gradient;
  float inverse_scale;
  bool held;
  float g[kPerThread];

  __device__ Share(const Piece& p, float scale)
      : piece(p), variant{p.at(kFlags)}, gradient(p.pointer<const void>(kGrad)), inverse_scale(scale) {
    // The gradient's own alignment: other memory of its tensor does not matter here.
    held = !variant.strided() && reinterpret_cast<unsigned long long>(gradient) % 16 == 0 && piece.size == kChunk;
    if (!held) return;
    if (variant.half_gradient() || variant.brain_gradient()) {
      hold<8>();
    } else {
      hold<4>();
    }
  }

  template <int W>  // elements in 16 bytes
  __device__ void hold() {
#pragma unroll
    for (int i = 0; i < kPerThread / W; ++i) {
      const long long offset = piece.begin + (i * kThreads + static_cast<int>(threadIdx.x)) * W;
      const Pack<float, W> pack = load_gradient<W>(variant, gradient, offset);
#pragma unroll
      for (int j = 0; j < W; ++j) g[i * W + j] = pack.x[j] * inverse_scale;
    }
  }

  // Visits every element in a fixed order. `chain` is a constant once the loop is unrolled.
  template <class Visit>
  __device__ void each(Visit visit) const {
    if (held) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) visit(g[i], i % 4);
      return;
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < piece.size; i += kThreads) {
      long long offset = piece.begin + i;
      if (variant.strided()) offset = Strided(piece.layout, offset)[kRoleGrad];
      visit(load_gradient<1>(variant, gradient, offset).x[0] * inverse_scale, 0);
    }
  }
};

__device__ float not_a_number() { return bits_float(0x7fc00000u); }

// 1 / loss scale: `scale` holds it on the device, or is null.
__device__ float inverse_of(const float* scale, float otherwise) { return scale ? div_rn(1.0f, *scale) : otherwise; }

// One row per chunk of each tensor. block_count: of the whole map, of which this launch may be a part. The row of a chunk that is not finite still describes its finite elements.
template <int GRADIENT>
__global__ void __launch_bounds__(kThreads, GRADIENT == kAny ? kGeneralBlocks : 0)
    analyze(const long long* fields, const long long* layouts, const long long* blocks, long long count, StatsRow* rows,
            const float* scale, float inverse_scale, long long block_count) {
  __shared__ unsigned largest[kWarps], largest_finite[kWarps];
  __shared__ float sums[kWarps];
  // The division is a function call on some devices: before anything else is held in registers.
  inverse_scale = inverse_of(scale, inverse_scale);
  const Piece piece(Table{fields, layouts, blocks, count}, blockIdx.x);
  const Share<GRADIENT> share(piece, inverse_scale);

  unsigned most = 0;
  share.each([&](float g, int) { most = Larger()(most, float_bits(g) & kAbsMask); });
  most = reduce_block(most, largest, Larger());
  const bool bad = most >= kInfinityBits;  // the same for the whole block
  if (bad) {
    most = 0;
    share.each([&](float g, int) {
      const unsigned magnitude = float_bits(g) & kAbsMask;
      most = Larger()(most, magnitude < kInfinityBits ? magnitude : 0u);
    });
    most = reduce_block(most, largest_finite, Larger());
  }

  const float rescale = power_of_two_rescale(most);
  float sum[4] = {};  // four chains instead of one: fewer roundings in a row, and they overlap
  share.each([&](float g, int chain) {
    const bool counts = (float_bits(g) & kAbsMask) <= most;  // all but what is not finite
    sum[chain] += counts ? rescaled_square(g, rescale) : 0.0f;
  });
  const float total = reduce_block((sum[0] + sum[1]) + (sum[2] + sum[3]), sums, Plus());
  if (threadIdx.x == 0) rows[blocks[block_count + blockIdx.x]] = stats_row(most, total, rescale, bad);
}

// Rows [begin, end) as one; the whole block works on it and every thread gets it. Unrolled, so that several rows are on
// their way at once: one block alone has little else to wait with.
__device__ StatsRow merge_rows(const StatsRow* rows, long long begin, long long end) {
  __shared__ unsigned largest[kWarps], bads[kWarps];
  __shared__ double sums[kWarps];
  unsigned most = 0, bad = 0;
#pragma unroll 8
  for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
    most = Larger()(most, float_bits(rows[i].scale));  // not negative: ordered like the integers
    bad |= rows[i].bad != 0.0f;
  }
  const float scale = bits_float(reduce_block(most, largest, Larger()));
  const float any_bad = reduce_block(bad, bads, Larger()) ? 1.0f : 0.0f;
  double sum = 0.0;
#pragma unroll 8
  for (long long i = begin + threadIdx.x; i < end; i += kThreads) sum += rescaled_sumsq(rows[i], scale);
  sum = reduce_block(sum, sums, Plus());
  return {scale, static_cast<float>(sum), any_bad};
}

// Merges up to `fan_in` rows per block. FINAL writes one report (bad, scale, sumsq) instead of rows.
template <bool FINAL>
__global__ void __launch_bounds__(kThreads) merge(const StatsRow* rows, float* out, long long count, long long fan_in) {
  const long long begin = static_cast<long long>(blockIdx.x) * fan_in;
  const StatsRow merged = merge_rows(rows, begin, count - begin < fan_in ? count : begin + fan_in);
  if (threadIdx.x != 0) return;
  if (FINAL) {
    out[0] = merged.bad;
    out[1] = merged.scale;
    out[2] = merged.sumsq;
  } else {
    reinterpret_cast<StatsRow*>(out)[blockIdx.x] = merged;
  }
}

// ---- the decision of a step ------------------------------------------------------------------------------------------

// One block, and the only one. Kernels.decide in kernels/__init__.py says what is read and written; `scale` and `found_inf`
// may be null, and row_count is -1 without rows. Tensor i's group is the row kCoefficientRow of `hyperparameters`. A template,
// so that the other instances do not compile it too.
template <int = 0>
__global__ void __launch_bounds__(kThreads)
    decide(const long long* fields, long long count, const Hyperparameters* hyperparameters, double* report,
           float* decision, long long* counts, Coefficients* coefficients, const StatsRow* rows, long long row_count,
           const float* scale, const float* found_inf, float inverse_scale, int measured, int check_finite) {
  const float found = found_inf ? *found_inf : 0.0f;
  double bad = 0.0, largest = not_a_number(), sumsq = not_a_number();  // what is said of gradients that nobody measured
  if (row_count >= 0) {
    const StatsRow merged = merge_rows(rows, 0, row_count);
    bad = merged.bad;
    largest = merged.scale;
    sumsq = merged.sumsq;
  } else if (measured) {
    bad = report[0];
    largest = report[1];
    sumsq = report[2];
  }
  const Decision decided = decide_step(bad, largest, sumsq, measured, check_finite, found, hyperparameters->max_norm,
                                       hyperparameters->guard_epsilon);
  // A thread that reads the report after this sees the same numbers, or a bad one where found_inf calls the step off anyway.
  if (threadIdx.x == 0) {
    report[0] = bad != 0.0 || found > 0.0f ? 1.0 : 0.0;
    report[1] = largest;
    report[2] = sumsq;
    decision[0] = decided.skip ? 1.0f : 0.0f;
    decision[1] = decided.clip_factor;
    decision[2] = inverse_of(scale, inverse_scale);
    decision[3] = 0.0f;
    counts[0] += decided.skip;
    counts[1] = decided.skip ? counts[1] + 1 : 0;
  }
  // Powers in FP64 are dear, and most tensors of a group are at the same step: a thread remembers its last answer.
  long long known_group = -1;
  double known_step = 0.0;
  Coefficients c{};
  for (long long i = threadIdx.x; i < count; i += kThreads) {
    float* step = reinterpret_cast<float*>(fields[kStep * count + i]);
    __builtin_assume(__isGlobal(step));
    const long long group = fields[kCoefficientRow * count + i];
    const double t = static_cast<double>(*step) + 1.0;
    if (group != known_group || t != known_step) c = coefficients_of_step(hyperparameters[group], t);
    known_group = group;
    known_step = t;
    coefficients[i] = c;
    if (!decided.skip) *step = static_cast<float>(t);
  }
}

}  // namespace ruda
