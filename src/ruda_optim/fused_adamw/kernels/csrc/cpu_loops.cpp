// Load, loop, store. Compiled once per instruction-set level with -DRUDA_LEVEL=v4|v3|v2|plain; the arithmetic is in
// adamw_update.h and gradient_stats.h, so every level returns the same bits.
#include "cpu_loops.h"

#include "half.h"
#include "moments.h"
#include "statistics_blocks.h"

#if defined(__clang__)
#define RUDA_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define RUDA_VECTORIZE _Pragma("GCC ivdep")
#endif

namespace ruda {
namespace {

// The inputs and outputs of one block, all flat; Word is how moments are stored. An output may be its own input, never
// another array's.
template <class Word>
struct Block {
  const float *p, *g;
  const Word *m, *v, *v_max;
  float* p_out;
  Word *m_out, *v_out, *v_max_out;
};

// How far ahead of a loop its memory is asked for, and how often: a stretch is four cache lines of FP32. Asking beyond
// the end of an array is harmless.
constexpr int64_t kAhead = 512;
constexpr int64_t kStretch = 64;

// Always inline: to the compiler a function that only prefetches has no effect, and it drops a call of it.
template <class T>
RUDA_HD void prefetch_stretch(const T* from) {
  for (int64_t i = 0; i < kStretch; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

template <class Form, bool AMSGRAD>
RUDA_HD void update_elements(const Coefficients& c, const GradientFactors& f, unsigned seed,
                             const Block<typename Form::Word>& b, int64_t from, int64_t n) {
  using Word = typename Form::Word;
  RUDA_VECTORIZE
  for (int64_t i = from; i < from + n; ++i) {
    Words<Word> words{b.m[i], Form::kPacked ? Word() : b.v[i], AMSGRAD ? b.v_max[i] : Word()};
    b.p_out[i] = update_element<Form, AMSGRAD>(c, f, seed, b.g[i], b.p[i], words);
    b.m_out[i] = words.m;
    if (!Form::kPacked) b.v_out[i] = words.v;
    if (AMSGRAD) b.v_max_out[i] = words.v_max;
  }
}

template <class Form, bool AMSGRAD, bool PREFETCH>
RUDA_HD void update_stretches(const Coefficients& c, const GradientFactors& f, const Block<typename Form::Word>& b,
                              int64_t n) {
  const unsigned seed = seed_of(c);
  int64_t i = 0;
  for (; PREFETCH && i + kStretch <= n; i += kStretch) {
    prefetch_stretch(b.p + i + kAhead);
    prefetch_stretch(b.g + i + kAhead);
    prefetch_stretch(b.m + i + kAhead);
    if (!Form::kPacked) prefetch_stretch(b.v + i + kAhead);
    if (AMSGRAD) prefetch_stretch(b.v_max + i + kAhead);
    update_elements<Form, AMSGRAD>(c, f, seed, b, i, kStretch);
  }
  update_elements<Form, AMSGRAD>(c, f, seed, b, i, n - i);
}

template <class Form, bool AMSGRAD, bool PREFETCH>
void update_block(const Coefficients& coefficients, const GradientFactors& factors,
                  const Block<typename Form::Word>& block, int64_t n) {
  // Local copies: float stores could otherwise alias the coefficients, and nothing would vectorise.
  const Coefficients c = coefficients;
  const GradientFactors f = factors;
  const Block<typename Form::Word> b = block;
  // Twice the same, so that the compiler knows in the usual one which end every lerp starts from. Moments in 16 bits gain
  // 10 percent in the cache; FP32 waits for its division and its root, and gains nothing.
  if (Form::kDithered && near_old(c.one_minus_beta1) && near_old(c.one_minus_beta2)) {
    update_stretches<Form, AMSGRAD, PREFETCH>(c, f, b, n);
  } else {
    update_stretches<Form, AMSGRAD, PREFETCH>(c, f, b, n);
  }
}

template <class T>
T* pointer(const TableView& table, Field field, int64_t tensor) {
  return reinterpret_cast<T*>(table.at(field, tensor));
}

// One tensor's layout record: [dimensions, sizes..., strides of role 0..., strides of role 1..., ...], outermost first.
struct Layout {
  int64_t dimensions;
  const int64_t* sizes;
  const int64_t* strides;

  Layout(const int64_t* record, Role role)
      : dimensions(record[0]), sizes(record + 1), strides(record + 1 + (1 + role) * record[0]) {}

  // Calls run(offset, stride, first, count) for the stretches of the innermost dimension that cover [begin, begin + n).
  template <class Run>
  void walk(int64_t begin, int64_t n, const Run& run) const {
    const int64_t inner = sizes[dimensions - 1];
    for (int64_t done = 0; done < n;) {
      int64_t index = begin + done;
      const int64_t column = index % inner;
      int64_t offset = column * strides[dimensions - 1];
      index /= inner;
      for (int64_t d = dimensions - 2; d >= 0; --d) {
        offset += index % sizes[d] * strides[d];
        index /= sizes[d];
      }
      const int64_t count = inner - column < n - done ? inner - column : n - done;
      run(offset, strides[dimensions - 1], done, count);
      done += count;
    }
  }
};

template <class T>
void gather(const Layout& layout, const T* base, int64_t begin, int64_t n, T* out) {
  layout.walk(begin, n, [&](int64_t offset, int64_t stride, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[first + i] = base[offset + i * stride];
  });
}

template <class T>
void scatter(const Layout& layout, const T* in, int64_t begin, int64_t n, T* base) {
  layout.walk(begin, n, [&](int64_t offset, int64_t stride, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) base[offset + i * stride] = in[first + i];
  });
}

// Reads and writes the elements [begin, begin + n) of one role, flat or strided. A flat read returns the memory itself.
struct Access {
  const TableView& table;
  int64_t tensor;
  bool strided;

  Layout layout(Role role) const { return Layout(table.layouts + table.at(kLayout, tensor), role); }

  template <class T>
  const T* read(Field field, Role role, int64_t begin, int64_t n, T* scratch) const {
    const T* base = pointer<const T>(table, field, tensor);
    if (!strided) return base + begin;
    gather(layout(role), base, begin, n, scratch);
    return scratch;
  }

  // Where a kernel may write its result: the memory itself, or scratch that `commit` scatters.
  template <class T>
  T* target(Field field, int64_t begin, T* scratch) const {
    return strided ? scratch : pointer<T>(table, field, tensor) + begin;
  }

  template <class T>
  void commit(Field field, Role role, int64_t begin, int64_t n, const T* scratch) const {
    if (strided) scatter(layout(role), scratch, begin, n, pointer<T>(table, field, tensor));
  }

  // The master beside a half parameter, which follow_fp16 and follow_bf16 describe. Only a block that somebody wrote to is
  // copied to scratch.
  const float* master(int64_t flags, int64_t begin, int64_t n, uint16_t* half, uint16_t* rounded,
                      float* scratch) const {
    const float* in = read<float>(kParam, kRoleParam, begin, n, scratch);
    const uint16_t* parameter = read<uint16_t>(kCopy, kRoleCopy, begin, n, half);
    const bool fp16 = flags & kCopyFp16;
    fp16 ? float_to_fp16(in, rounded, n) : float_to_bf16(in, rounded, n);
    if (__builtin_memcmp(parameter, rounded, 2 * n) == 0) return in;
    for (int64_t i = 0; i < n; ++i) {
      scratch[i] = fp16 ? follow_fp16(in[i], parameter[i]) : follow_bf16(in[i], parameter[i]);
    }
    return scratch;
  }

  // The gradient as FP32. `prefetch` asks for the next block of a half gradient before this one is converted.
  const float* gradient(int64_t flags, int64_t begin, int64_t n, bool prefetch, uint16_t* half, float* scratch) const {
    if (!(flags & (kGradFp16 | kGradBf16))) return read<float>(kGrad, kRoleGrad, begin, n, scratch);
    const uint16_t* in = read<uint16_t>(kGrad, kRoleGrad, begin, n, half);
    for (int64_t i = 0; prefetch && i < n; i += 32) __builtin_prefetch(in + n + i);
    if (flags & kGradFp16) {
      fp16_to_float(in, scratch, n);
    } else {
      bf16_to_float(in, scratch, n);
    }
    return scratch;
  }
};

// Zeros that stand for the moments of a first step, whose memory holds nothing yet.
alignas(64) const float kZeros[kBlock] = {};

template <class Form>
void update_form(const TableView& table, int64_t tensor, int64_t begin, int64_t end, const UpdateArguments& arguments) {
  using Word = typename Form::Word;
  const int64_t flags = table.at(kFlags, tensor);
  const int64_t row = arguments.row_per_tensor ? tensor : table.at(kCoefficientRow, tensor);
  const Coefficients& c = arguments.coefficients[row];
  const GradientFactors factors = gradient_factors(c, arguments.inverse_scale, arguments.clip_factor);
  const bool amsgrad = flags & kAmsgrad;
  const bool first = flags & kFirst;
  const bool split = flags & kSplit;
  const bool copy = flags & (kCopyFp16 | kCopyBf16);
  const Access access{table, tensor, (flags & kStrided) != 0};
  const auto plain = amsgrad ? update_block<Form, true, false> : update_block<Form, false, false>;
  const auto ahead = amsgrad ? update_block<Form, true, true> : update_block<Form, false, true>;
  const auto run = arguments.prefetch ? ahead : plain;
  const Word* zeros = reinterpret_cast<const Word*>(kZeros);

  // Flat, and nothing to convert before the loop: the whole range is one block.
  const bool direct = !access.strided && !first && !split && !copy && !(flags & (kGradFp16 | kGradBf16));
  const int64_t block_size = direct ? end - begin : kBlock;

  alignas(64) float p[kBlock], g[kBlock];
  alignas(64) Word m[kBlock], v[kBlock], v_max[kBlock];
  alignas(64) uint16_t half[kBlock], low[kBlock];
  for (int64_t at = begin; at < end; at += block_size) {
    const int64_t n = end - at < block_size ? end - at : block_size;
    Block<Word> b{};
    if (split) {
      join_master(access.read<uint16_t>(kCopy, kRoleCopy, at, n, half),
                  access.read<uint16_t>(kRemainder, kRoleRemainder, at, n, low), p, n);
      b.p = p;
      b.p_out = p;
    } else {
      b.p = copy ? access.master(flags, at, n, half, low, p) : access.read<float>(kParam, kRoleParam, at, n, p);
      b.p_out = access.target<float>(kParamOut, at, p);
    }
    b.g = access.gradient(flags, at, n, arguments.prefetch, half, g);
    b.m = first ? zeros : access.read<Word>(kExpAvg, kRoleExpAvg, at, n, m);
    b.m_out = access.target<Word>(kExpAvgOut, at, m);
    if (!Form::kPacked) {
      b.v = first ? zeros : access.read<Word>(kExpAvgSq, kRoleExpAvgSq, at, n, v);
      b.v_out = access.target<Word>(kExpAvgSqOut, at, v);
    }
    if (amsgrad) {
      b.v_max = first ? zeros : access.read<Word>(kMaxExpAvgSq, kRoleMaxExpAvgSq, at, n, v_max);
      b.v_max_out = access.target<Word>(kMaxExpAvgSqOut, at, v_max);
    }

    run(c, factors, b, n);

    access.commit<Word>(kExpAvgOut, kRoleExpAvg, at, n, b.m_out);
    if (!Form::kPacked) access.commit<Word>(kExpAvgSqOut, kRoleExpAvgSq, at, n, b.v_out);
    if (amsgrad) access.commit<Word>(kMaxExpAvgSqOut, kRoleMaxExpAvgSq, at, n, b.v_max_out);
    if (split) {
      uint16_t* high = access.target<uint16_t>(kCopy, at, half);
      uint16_t* remainder = access.target<uint16_t>(kRemainder, at, low);
      split_master(b.p_out, high, remainder, n);
      access.commit<uint16_t>(kCopy, kRoleCopy, at, n, high);
      access.commit<uint16_t>(kRemainder, kRoleRemainder, at, n, remainder);
    } else {
      access.commit<float>(kParamOut, kRoleParam, at, n, b.p_out);
      if (copy) {
        uint16_t* out = access.target<uint16_t>(kCopy, at, half);
        if (flags & kCopyFp16) {
          float_to_fp16(b.p_out, out, n);
        } else {
          float_to_bf16(b.p_out, out, n);
        }
        access.commit<uint16_t>(kCopy, kRoleCopy, at, n, out);
      }
    }
  }
}

void update(const TableView& table, int64_t tensor, int64_t begin, int64_t end, const UpdateArguments& arguments) {
  const int64_t flags = table.at(kFlags, tensor);
  const auto run = flags & kMomentsPacked ? update_form<PackedMoments>
                   : flags & kMomentsBf16 ? update_form<Bf16Moments>
                                          : update_form<Fp32Moments>;
  run(table, tensor, begin, end, arguments);
}

StatsRow analyze(const TableView& table, int64_t tensor, int64_t begin, int64_t end,
                 const StatisticsArguments& arguments) {
  const int64_t flags = table.at(kFlags, tensor);
  const Access access{table, tensor, (flags & kStrided) != 0};
  RowSums row;
  int64_t at = begin;
  if (!access.strided) {
    const int64_t blocks = (end - begin) / kBlock;
    if (flags & kGradFp16) {
      add_blocks(pointer<const Fp16>(table, kGrad, tensor) + begin, blocks, arguments, &row);
    } else if (flags & kGradBf16) {
      add_blocks(pointer<const Bf16>(table, kGrad, tensor) + begin, blocks, arguments, &row);
    } else {
      add_blocks(pointer<const float>(table, kGrad, tensor) + begin, blocks, arguments, &row);
    }
    at += blocks * kBlock;
  }
  alignas(64) float scratch[kBlock], padded[kBlock];
  alignas(64) uint16_t half[kBlock];
  for (; at < end; at += kBlock) {
    const int64_t n = end - at < kBlock ? end - at : kBlock;
    const int64_t whole = (n + kGroup - 1) / kGroup * kGroup;
    const float* g = access.gradient(flags, at, n, arguments.prefetch, half, scratch);
    if (n != whole) {  // zeros change neither the sum nor the maximum
      for (int64_t i = 0; i < whole; ++i) padded[i] = i < n ? g[i] : 0.0f;
      g = padded;
    }
    row.squares += any_block(g, whole, arguments.inverse_scale, &row);
  }
  const float scale = bits_float(row.largest);
  const double wide = scale;
  return {scale, row.largest == 0 ? 0.0f : static_cast<float>(row.squares / (wide * wide)), row.bad ? 1.0f : 0.0f};
}

}  // namespace

namespace RUDA_LEVEL {
const CpuLoops* loops() {
  static const CpuLoops kLoops = {
#if defined(__AVX512F__)
      4,
#elif defined(__AVX2__)
      3,
#elif defined(__SSE4_2__)
      2,
#else
      0,
#endif
      update, analyze};
  return &kLoops;
}
}  // namespace RUDA_LEVEL

}  // namespace ruda
