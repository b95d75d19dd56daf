// Exact conversions between fp8, bf16, fp16 and fp32, and the unpacking of blocks of W (cpu_scaled_mm.cpp).
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "needs AVX2, FMA and F16C"
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define FP8PASS_AVX512 1
#endif
#if defined(FP8PASS_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define FP8PASS_BYTE_TABLES 1
#endif

namespace {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;

constexpr long NB = 32;         // columns per block
constexpr long KR = 32;         // K is padded to a multiple of this (one AMX tile row of bf16)
constexpr long GEMV_ROWS = 4;   // up to here the product is bound by reading weights
constexpr long ROW_GROUP = 32;  // rows of A converted at a time; AMX works on 32 rows

enum Isa { AUTO = 0, FP32 = 1, BF16 = 2, AMX = 3, GEMV = 4, GEMV_BF16 = 5 };
enum Type { NONE = 0, F32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

struct Job {
  const u8 *a, *w;
  const u16* packed;
  const float *scale_a, *scale_b;
  const void* bias;
  void* out;
  long M, N, K, KP, lda, ldw, threads;
  bool a_e5, w_e5, rowwise, colwise;
  int bias_type, out_type;
};

inline long round_up(long x, long to) { return (x + to - 1) / to * to; }
inline u32 bits(float x) { u32 u; std::memcpy(&u, &x, 4); return u; }
inline float real(u32 u) { float x; std::memcpy(&x, &u, 4); return x; }

inline float half_to_float(u16 h) { return _cvtsh_ss(h); }
inline u16 float_to_bf16(float x) {
  const u32 u = bits(x);
  return (u & 0x7fffffff) > 0x7f800000u ? u16(0x7fc0) : u16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#ifdef FP8PASS_AVX512
typedef __m512 vf;
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
#else
typedef __m256 vf;
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf splat(float x) { return _mm256_set1_ps(x); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
#endif
constexpr long VW = sizeof(vf) / sizeof(float);

// ---- exact conversions ------------------------------------------------------------------------------
// By way of fp16, whose conversion instructions ignore the flush-denormals mode (multiplying an fp8
// subnormal placed in an fp32 would not, and would be slow on CPUs that trap for subnormals). e5m2 is the
// upper half of fp16. e4m3 has a bias of 7 where fp16 has 15: moved under fp16's exponent it reads as
// value / 256, exactly, subnormals included.

// e4m3 in 16-bit lanes -> fp16 bits; `wide` holds the sign-extended code << 7
template <bool NANS> inline __m256i e4m3_halves(__m256i wide) {
  __m256i h = _mm256_and_si256(wide, _mm256_set1_epi16(short(0xbf80)));
  if (NANS) {
    const __m256i nan = _mm256_set1_epi16(short(0xbf80));
    const __m256i mag = _mm256_or_si256(h, _mm256_set1_epi16(short(0x8000)));
    h = _mm256_or_si256(h, _mm256_cmpeq_epi16(mag, nan));
  }
  return h;
}
template <bool E5> constexpr float half_scale() { return E5 ? 1.0f : 256.0f; }


template <bool E5, bool NANS> inline __m256i halves(__m128i codes) {  // NANS: e4m3's NaN codes become NaN
  if (E5) return _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
  return e4m3_halves<NANS>(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7));
}

inline __m128i codes16(const u8* p, long n) {  // the first n of 16 codes, then zeros
  if (n >= 16) return _mm_loadu_si128((const __m128i*)p);
  alignas(16) u8 tail[16] = {};
  std::memcpy(tail, p, n);
  return _mm_load_si128((const __m128i*)tail);
}

inline void floats16(__m256i h, vf* out) {  // 16 fp16 -> fp32
#ifdef FP8PASS_AVX512
  out[0] = _mm512_cvtph_ps(h);
#else
  out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
  out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
#endif
}

// n codes of a row, padded with zeros to `padded`, a multiple of 16
template <bool E5> void convert_row(const u8* in, long n, long padded, float* out) {
  for (long k = 0; k < padded; k += 16) {
    vf x[16 / VW];
    floats16(halves<E5, true>(k < n ? codes16(in + k, n - k) : _mm_setzero_si128()), x);
    for (long i = 0; i < 16 / VW; ++i) store(out + k + i * VW, mul(x[i], splat(half_scale<E5>())));
  }
}
#ifdef FP8PASS_AVX512
template <bool E5> void convert_row(const u8* in, long n, long padded, u16* out) {  // to bf16
  for (long k = 0; k < padded; k += 16) {
    vf x;
    floats16(halves<E5, true>(k < n ? codes16(in + k, n - k) : _mm_setzero_si128()), &x);
    const __m512i wide = _mm512_castps_si512(mul(x, splat(half_scale<E5>())));
    _mm256_storeu_si256((__m256i*)(out + k), _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16)));
  }
}
#endif

#ifdef FP8PASS_BYTE_TABLES
// The two bytes of the bf16 value of each of the 128 codes without their sign. Every fp8 value, subnormal or
// not, is a normal number in bf16, so that instructions which flush subnormals (dpbf16) take it as it is.
struct Bf16Bytes {
  alignas(64) u8 low[128], high[128];
  template <bool E5> static Bf16Bytes of() {
    Bf16Bytes t;
    for (int code = 0; code < 128; ++code) {
      const int mantissa_bits = E5 ? 2 : 3, bias = E5 ? 15 : 7;
      const int mantissa = code & ((1 << mantissa_bits) - 1), exponent = code >> mantissa_bits;
      float value = float(exponent ? mantissa | 1 << mantissa_bits : mantissa);
      const int power = (exponent ? exponent : 1) - bias - mantissa_bits;
      for (int i = 0; i < (power < 0 ? -power : power); ++i) value = power < 0 ? value / 2 : value * 2;
      u32 u = bits(value);
      if (E5 && exponent == 31) u = mantissa ? 0x7fc00000u : 0x7f800000u;
      if (!E5 && code == 127) u = 0x7fc00000u;
      t.low[code] = u8(u >> 16);
      t.high[code] = u8(u >> 24);
    }
    return t;
  }
};

template <bool E5> struct ByteTables {  // in registers
  __m512i low0, low1, high0, high1;
  ByteTables() {
    static const Bf16Bytes t = Bf16Bytes::of<E5>();
    low0 = _mm512_load_si512(t.low), low1 = _mm512_load_si512(t.low + 64);
    high0 = _mm512_load_si512(t.high), high1 = _mm512_load_si512(t.high + 64);
  }
  // 64 codes -> bf16: of each 16 codes the first 8 into `x`, the others into `y`
  void bf16(__m512i codes, __m512i& x, __m512i& y) const {
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
    high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // | sign
    x = _mm512_unpacklo_epi8(low, high);
    y = _mm512_unpackhi_epi8(low, high);
  }
};
#endif

// ---- unpacking W ------------------------------------------------------------------------------------
// unpack<E5, Sink>(): columns [n0, n0 + n) and k in [k0, k1) of W (k1 - k0 a multiple of KR).
// Sinks take, for one pair of k and 8 or 16 columns, the values of the even and of the odd k.

struct ToFloat {  // [k][NB] fp32
  typedef float T;
  static void put(float* out, long k, long col, vf even, vf odd) {
    store(out + k * NB + col, even);
    store(out + (k + 1) * NB + col, odd);
  }
};

#ifdef FP8PASS_AVX512
struct ToPairs {  // [k / 2][NB][2] bf16, a pair as one u32
  typedef u32 T;
  static void put(u32* out, long k, long col, vf even, vf odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    const __m512i high = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(int(0xffff0000)));
    _mm512_storeu_si512(out + k / 2 * NB + col, _mm512_or_si512(low, high));
  }
};
#endif

template <class Sink>
inline void put_halves(typename Sink::T* out, long k, long col, __m256i even, __m256i odd, vf scale) {
  vf e[16 / VW], o[16 / VW];
  floats16(even, e);
  floats16(odd, o);
  for (long i = 0; i < 16 / VW; ++i) Sink::put(out, k, col + i * VW, mul(e[i], scale), mul(o[i], scale));
}

// 16 columns x 16 k: transpose the k pairs (16-bit units) with 8x8 unpacking in each 128-bit lane, lane 0
// holding columns 0-7 and lane 1 columns 8-15.
template <bool E5, class Sink>
inline void unpack_square(const u8* const* rows, long k, typename Sink::T* out, long at, long col) {
  __m256i r[8], t[8];
  for (int i = 0; i < 8; ++i)
    r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(rows[i] + k))),
                                   _mm_loadu_si128((const __m128i*)(rows[i + 8] + k)), 1);
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i)
    for (int h = 0; h < 2; ++h) {
      r[4 * i + 2 * h] = _mm256_unpacklo_epi32(t[4 * i + h], t[4 * i + h + 2]);
      r[4 * i + 2 * h + 1] = _mm256_unpackhi_epi32(t[4 * i + h], t[4 * i + h + 2]);
    }
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi64(r[i], r[i + 4]);
    t[2 * i + 1] = _mm256_unpackhi_epi64(r[i], r[i + 4]);
  }
  const vf scale = splat(half_scale<E5>());
  for (int i = 0; i < 8; ++i) {  // t[i]: the codes of k = 2i (low byte) and 2i + 1 (high byte) of 16 columns
    const __m256i low = _mm256_slli_epi16(t[i], 8);
    __m256i even, odd;
    if (E5) {
      even = low;
      odd = _mm256_and_si256(t[i], _mm256_set1_epi16(short(0xff00)));
    } else {
      even = e4m3_halves<true>(_mm256_srai_epi16(low, 1));
      odd = e4m3_halves<true>(_mm256_srai_epi16(t[i], 1));
    }
    put_halves<Sink>(out, at + 2 * i, col, even, odd, scale);
  }
}

template <bool E5, class Sink>
void unpack(const Job& j, long n0, long n, long k0, long k1, typename Sink::T* out) {
  alignas(64) static const u8 zeros[16] = {};
  const long whole = (j.K < k1 ? j.K : k1) & ~15L;
  for (long col = 0; col < NB; col += 16) {
    const u8* rows[16];
    alignas(64) u8 tail[16][16] = {};
    const u8* tails[16];
    for (long i = 0; i < 16; ++i) {
      const bool inside = col + i < n;
      rows[i] = inside ? j.w + (n0 + col + i) * j.ldw : zeros;
      tails[i] = tail[i];
      if (inside && whole < k1 && whole < j.K) std::memcpy(tail[i], rows[i] + whole, j.K - whole);
    }
    if (col + 16 > n) {  // rows that do not exist read 16 zeros whatever k is
      for (long k = k0; k < whole; k += 16) {
        const u8* here[16];
        for (long i = 0; i < 16; ++i) here[i] = col + i < n ? rows[i] + k : zeros;
        unpack_square<E5, Sink>(here, 0, out, k - k0, col);
      }
    } else {
      for (long k = k0; k < whole; k += 16) unpack_square<E5, Sink>(rows, k, out, k - k0, col);
    }
    for (long k = whole > k0 ? whole : k0; k < k1; k += 16) {
      unpack_square<E5, Sink>(tails, 0, out, k - k0, col);
      std::memset(tail, 0, sizeof tail);
    }
  }
}

}  // namespace
