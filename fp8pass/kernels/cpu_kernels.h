// The inner kernels of the CPU product and what follows them: scales, bias, rounding (cpu_scaled_mm.cpp).
#pragma once
#include "cpu_convert.h"

#if defined(FP8PASS_AVX512) && defined(__AVX512BF16__)
#define FP8PASS_BF16 1
#endif
#if defined(FP8PASS_AVX512) && defined(__AMX_BF16__) && defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#define FP8PASS_AMX 1
#endif

namespace {

struct Columns {  // scales and bias of one block of columns, spread to vectors
  float scale[NB], bias[NB];
  Columns(const Job& j, long n0, long n) {
    for (long i = 0; i < NB; ++i) {
      const long c = n0 + (i < n ? i : 0);
      scale[i] = j.scale_b[j.colwise ? c : 0];
      bias[i] = j.bias_type == F32        ? static_cast<const float*>(j.bias)[c]
                : j.bias_type == BFLOAT16 ? real(u32(static_cast<const u16*>(j.bias)[c]) << 16)
                : j.bias_type == FLOAT16  ? half_to_float(static_cast<const u16*>(j.bias)[c])
                                          : -0.0f;  // x + -0 is x, also for x = -0
    }
  }
};

// Writes rows [m0, m0 + rows) of columns [n0, n0 + n): scales, bias, the one rounding.
void finish(const Job& j, const Columns& cols, long m0, long rows, long n0, long n, const float* c) {
  for (long r = 0; r < rows; ++r, c += NB) {
    const float sa = j.scale_a[j.rowwise ? m0 + r : 0];
    const size_t at = size_t(m0 + r) * j.N + n0;
    alignas(64) float v[NB];
    for (long i = 0; i < NB; ++i) v[i] = c[i] * sa * cols.scale[i] + cols.bias[i];
    if (j.out_type == F32) {
      std::memcpy(static_cast<float*>(j.out) + at, v, n * sizeof(float));
      continue;
    }
    alignas(64) u16 h[NB];
    if (j.out_type == BFLOAT16) {
      for (long i = 0; i < NB; ++i) h[i] = float_to_bf16(v[i]);
    } else {
      for (long i = 0; i < NB; i += 8)
        _mm_store_si128((__m128i*)(h + i), _mm256_cvtps_ph(_mm256_load_ps(v + i), _MM_FROUND_TO_NEAREST_INT));
    }
    u16* o = static_cast<u16*>(j.out) + at;
    if (n == NB) std::memcpy(o, h, sizeof h);
    else std::memcpy(o, h, n * sizeof(u16));
  }
}

// ---- kernels ----------------------------------------------------------------------------------------
// A policy has: T, one element of its converted A and W, holding PER values of k; MR rows and KC values of
// k worked on at once; CAP rows per task; pitch() and convert() of A's rows; multiply().

// rows of A times a [steps][NB] panel of W into c[rows][NB], added to c if `more`
template <class P, int R>
void micro(const typename P::T* a, long pitch, const typename P::T* w, long steps, float* c, bool more) {
  for (long col = 0; col < NB; col += VW * P::NV) {
    vf acc[R][P::NV];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < P::NV; ++v) acc[r][v] = more ? load(c + r * NB + col + v * VW) : splat(0);
    const typename P::T* panel = w + col;
    for (long s = 0; s < steps; ++s, panel += NB) {
      typename P::V wv[P::NV];
      for (int v = 0; v < P::NV; ++v) wv[v] = P::vector(panel + v * VW);
      for (int r = 0; r < R; ++r) {
        const typename P::V av = P::broadcast(a[r * pitch + s]);
        for (int v = 0; v < P::NV; ++v) acc[r][v] = P::dot(av, wv[v], acc[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < P::NV; ++v) store(c + r * NB + col + v * VW, acc[r][v]);
  }
}

template <class P, int R = P::MR>
void micro_rows(long rows, const typename P::T* a, long pitch, const typename P::T* w, long steps, float* c,
                bool more) {
  if constexpr (R > 1) {
    if (rows < R) return micro_rows<P, R - 1>(rows, a, pitch, w, steps, c, more);
  }
  micro<P, R>(a, pitch, w, steps, c, more);
}

template <class Self, class Element, long Per> struct RowMajor {  // A as [M][pitch]
  typedef Element T;
  static constexpr long PER = Per, CAP = 240;
  static void begin() {}
  static void end() {}
  static long size(const Job& j) { return j.M * pitch(j); }
  // one cache line more than needed: rows a multiple of 4 KiB apart would share their cache sets
  static long pitch(const Job& j) { return j.KP / PER + 64 / long(sizeof(T)); }
  static void multiply(const Job& j, const T* a, long m, long rows, const T* w, long k0, long ks, float* c,
                       bool more) {
    micro_rows<Self>(rows, a + m * pitch(j) + k0 / PER, pitch(j), w, ks / PER, c, more);
  }
};

struct Fp32 : RowMajor<Fp32, float, 1> {
  typedef ToFloat Sink;
  typedef vf V;
#if defined(FP8PASS_AVX512)
  static constexpr int MR = 12, NV = 2;
#else
  static constexpr int MR = 6, NV = 2;
#endif
  static constexpr long KC = 1024;
  static vf vector(const float* p) { return load(p); }
  static vf broadcast(float x) { return splat(x); }
  static vf dot(vf a, vf w, vf c) { return fma(a, w, c); }
  template <bool E5> static void convert(const Job& j, long m, float* a) {
    convert_row<E5>(j.a + m * j.lda, j.K, j.KP, a + m * pitch(j));
  }
  static const float* panel(const u32* packed, long ks, float* scratch) {  // bf16 pairs -> [k][NB] fp32
    for (long k = 0; k < ks; k += 2, packed += NB)
      for (long i = 0; i < NB; ++i) {
        scratch[k * NB + i] = real(packed[i] << 16);
        scratch[(k + 1) * NB + i] = real(packed[i] & 0xffff0000u);
      }
    return scratch;
  }
};

#ifdef FP8PASS_BF16
struct Bf16 : RowMajor<Bf16, u32, 2> {
  typedef ToPairs Sink;
  typedef __m512i V;
  static constexpr int MR = 12, NV = 2;
  static constexpr long KC = 2048;
  static V vector(const u32* p) { return _mm512_loadu_si512(p); }
  static V broadcast(u32 x) { return _mm512_set1_epi32(int(x)); }
  static vf dot(V a, V w, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)w); }
  template <bool E5> static void convert(const Job& j, long m, u32* a) {
    convert_row<E5>(j.a + m * j.lda, j.K, j.KP, reinterpret_cast<u16*>(a + m * pitch(j)));
  }
  static const u32* panel(const u32* packed, long, u32*) { return packed; }
};
#endif

#ifdef FP8PASS_AMX
struct Amx {
  typedef u32 T;
  typedef ToPairs Sink;
  static constexpr int MR = 32;
  static constexpr long PER = 2, KC = 1L << 40, CAP = 1024;
  static constexpr long TILE = 16 * 16;  // elements (pairs) of a 16 x 32 bf16 tile, 1 KiB

  struct alignas(64) Config {
    u8 palette = 1, start_row = 0, reserved[14] = {};
    u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static bool permitted() {  // Linux hands out the tile registers per process, on request
    constexpr long GET = 0x1022, REQUEST = 0x1023, TILE_DATA = 18;
    static const bool granted = [] {
      unsigned long mask = 0;
      return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA) && !syscall(SYS_arch_prctl, GET, &mask) &&
             (mask >> TILE_DATA & 1);
    }();
    return granted;
  }
  // The fences: GCC's tile intrinsics do not all tell the compiler what memory they read.
  static void fence(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }
  static void begin() {
    const Config config;
    fence(&config);
    _tile_loadconfig(&config);
    fence(&config);
  }
  static void end() { _tile_release(); }

  // A as [ceil(M / 32) * 2][KP / 32] tiles, each contiguous: no cache set is shared by a tile's rows
  static long size(const Job& j) { return round_up(j.M, ROW_GROUP) * j.KP / PER; }
  template <bool E5> static void convert(const Job& j, long m, T* a) {
    const u8* in = j.a + m * j.lda;
    T* tile = a + m / 16 * (j.KP / KR) * TILE + m % 16 * 16;
    for (long k = 0; k < j.KP; k += KR, tile += TILE)
      convert_row<E5>(in + k, j.K - k, KR, reinterpret_cast<u16*>(tile));
    if (m == j.M - 1)  // rows that fill up the last tiles: their products are never written
      for (long pad = m + 1; pad < round_up(j.M, ROW_GROUP); ++pad)
        for (long k = 0; k < j.KP / KR; ++k)
          std::memset(a + (pad / 16 * (j.KP / KR) + k) * TILE + pad % 16 * 16, 0, 64);
  }
  static const T* panel(const u32* packed, long, T*) { return packed; }

  __attribute__((noinline)) static void multiply(const Job& j, const T* a, long m, long rows, const T* w, long,
                                                 long ks, float* c, bool) {
    const T* low = a + m / 16 * (j.KP / KR) * TILE;
    const T* high = low + j.KP / KR * TILE;
    const long steps = ks / KR, pitch = NB * sizeof(float);
    fence(a), fence(w), fence(c);
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) {
      for (long s = 0; s < steps; ++s, low += TILE, w += KR / 2 * NB) {
        _tile_loadd(4, low, 64);
        _tile_loadd(6, w, pitch);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 16, pitch);
        _tile_dpbf16ps(1, 4, 7);
      }
    } else {
      _tile_zero(2);
      _tile_zero(3);
      for (long s = 0; s < steps; ++s, low += TILE, high += TILE, w += KR / 2 * NB) {
        _tile_loadd(4, low, 64);
        _tile_loadd(6, w, pitch);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 16, pitch);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, high, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, c + 16 * NB, pitch);
      _tile_stored(3, c + 16 * NB + 16, pitch);
    }
    _tile_stored(0, c, pitch);
    _tile_stored(1, c + 16, pitch);
    fence(c);
  }
};
#endif

}  // namespace
