// FP8 W8A8 matrix product for CPUs: out = round_once((A . B) * scale_a * scale_b + bias).
//
// A is [M, K] fp8 (row stride lda), B is given as its transpose W, [N, K] fp8 (row stride ldw): the
// layout of a linear layer's weight. Every fp8 value is exact in bf16 and in fp32, so the product
// needs no fp8 hardware: convert exactly, accumulate in fp32, scale in fp32, round once.
//
// Blocks.  Columns of the result are worked on in blocks of NB = 32. The packed form of W, whether
// made ahead of time (`packed`, see cpu.py: pack) or per block into thread-local scratch, is
//     [ceil(N / NB)][KP / 2][NB][2] bf16,   KP = K rounded up to KR, zero padded in N and K,
// that is the pair-interleaved ("VNNI") layout that AVX512-BF16 and AMX read. The fp32 kernel
// reads [KP][NB] fp32 instead, which it makes per block (a few per cent of the product's time).
//
// Kernels: GEMV for M <= 4 straight from the fp8 bytes (reads one byte per weight, the least possible) in fp32
// or, with AVX512-BF16 and VBMI, in pairs of bf16 that two table lookups make of the codes; for more rows FP32 (AVX2, AVX-512), BF16 (AVX512-BF16), AMX. All threads draw (row chunk, column block) tasks from one
// counter. A column block is always reduced in the same order, hence the result depends neither on the
// thread count nor on whether `packed` was given.
//
// Files: cpu_convert.h (conversions), cpu_kernels.h (inner kernels), here tasks, threads, entry points.
// Built by cpu.py with the compiler that Inductor uses, for the machine it runs on; no torch, Python or
// OpenMP headers, so that it compiles in seconds with any of them.
#include "cpu_kernels.h"

#include <atomic>
#include <cstdlib>

// The entry point of the OpenMP runtime that torch has already loaded. Called by name, weakly, instead of
// through `-fopenmp`: the compiler could be clang (LLVM's runtime) while torch brings GNU's, and two
// pools of threads would spin against each other. Unresolved: one thread.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace {

// ---- scratch and threads ----------------------------------------------------------------------------

struct Buffer {  // grows, is kept between calls up to KEEP, freed when its thread ends
  static constexpr size_t KEEP = size_t(32) << 20;
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
  template <class T> T* get(size_t count) {
    const size_t need = (count * sizeof(T) + 4096) & ~size_t(4095);
    if (need > size) {
      std::free(data);
      if (posix_memalign(&data, 4096, need)) data = nullptr;
      size = data ? need : 0;
    }
    return static_cast<T*>(data);
  }
  void trim() {
    if (size <= KEEP) return;
    std::free(data);
    data = nullptr;
    size = 0;
  }
};
thread_local Buffer activations, weights, sums;

template <class Body> void parallel(long threads, long tasks, const Body& body) {
  struct Shared { const Body* body; std::atomic<long> next; long tasks; } shared{&body, {0}, tasks};
  auto work = [](void* p) {
    Shared& s = *static_cast<Shared*>(p);
    (*s.body)([&s] {  // draws a task, or -1 when none is left
      const long task = s.next.fetch_add(1, std::memory_order_relaxed);
      return task < s.tasks ? task : -1;
    });
  };
  threads = threads < tasks ? threads : tasks;
  if (threads > 1 && GOMP_parallel) GOMP_parallel(work, &shared, unsigned(threads), 0);
  else work(&shared);
}

// ---- drivers ----------------------------------------------------------------------------------------

template <class P> bool product(const Job& j) {
  typedef typename P::T T;
  T* a = activations.get<T>(P::size(j));
  if (!a) return false;
  const long groups = (j.M + ROW_GROUP - 1) / ROW_GROUP;  // alone up to ~20 us, what a second region may cost
  parallel(j.M * j.K > (1 << 18) ? j.threads : 1, groups, [&](auto draw) {
    for (long g; (g = draw()) >= 0;)
      for (long m = g * ROW_GROUP; m < j.M && m < (g + 1) * ROW_GROUP; ++m)
        j.a_e5 ? P::template convert<true>(j, m, a) : P::template convert<false>(j, m, a);
  });

  // Tasks: column blocks, times row chunks where the blocks alone would not balance the threads. Each task
  // unpacks its block anew, so not more chunks than that.
  const long blocks = (j.N + NB - 1) / NB;
  long chunks = (j.M + P::CAP - 1) / P::CAP;
  const long wanted = j.threads > 1 ? (4 * j.threads + blocks - 1) / blocks : 1, most = (j.M + 31) / 32;
  if (chunks < wanted) chunks = wanted < most ? wanted : most;
  const long chunk = round_up((j.M + chunks - 1) / chunks, P::MR);
  chunks = (j.M + chunk - 1) / chunk;
  const bool one = j.KP <= P::KC;
  std::atomic<bool> good{true};
  parallel(j.threads, blocks * chunks, [&](auto draw) {
    T* scratch = weights.get<T>((one ? j.KP : P::KC) / P::PER * NB);
    float* c = sums.get<float>((one ? long(P::MR) : chunk) * NB);
    if (!scratch || !c) {
      good = false;
      return;
    }
    P::begin();
    for (long task; (task = draw()) >= 0;) {
      const long block = task / chunks, n0 = block * NB, n = j.N - n0 < NB ? j.N - n0 : NB;
      const long m0 = task % chunks * chunk, m1 = m0 + chunk < j.M ? m0 + chunk : j.M;
      const Columns cols(j, n0, n);
      for (long k0 = 0; k0 < j.KP; k0 += P::KC) {
        const long ks = j.KP - k0 < P::KC ? j.KP - k0 : P::KC;
        const T* w = scratch;
        if (j.packed) {
          const u32* pairs = reinterpret_cast<const u32*>(j.packed) + (block * j.KP + k0) / 2 * NB;
          w = P::panel(pairs, ks, scratch);
        } else if (j.w_e5) {
          unpack<true, typename P::Sink>(j, n0, n, k0, k0 + ks, scratch);
        } else {
          unpack<false, typename P::Sink>(j, n0, n, k0, k0 + ks, scratch);
        }
        for (long m = m0; m < m1; m += P::MR) {
          const long rows = m1 - m < P::MR ? m1 - m : P::MR;
          float* here = one ? c : c + (m - m0) * NB;
          P::multiply(j, a, m, rows, w, k0, ks, here, k0 > 0);
          if (k0 + ks == j.KP) finish(j, cols, m, rows, n0, n, here);
        }
      }
    }
    P::end();
    weights.trim();
    sums.trim();
  });
  activations.trim();
  return good;
}

inline float total(vf x) {  // halves are added until one is left, in registers: K is often short
#ifdef FP8PASS_AVX512
  const __m512d wide = _mm512_castps_pd(x);
  __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(wide, 1)));
#else
  const __m256 y = x;
#endif
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}

// c[r][i] = A[r] . W[i] for R rows of A (fp32, zero padded) and C rows of W (fp8)
template <bool E5, int R, int C>
void dots(const float* a, long pitch, const u8* w, long ldw, long K, float* c) {
  constexpr int PARTS = 16 / VW, AHEAD = 8;  // rows of W prefetched: cold ones come a fifth sooner
  vf acc[R][C][PARTS];
  __m128i top[C];
  for (int i = 0; i < C; ++i) {
    top[i] = _mm_setzero_si128();
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < PARTS; ++p) acc[r][i][p] = splat(0);
  }
  const auto step = [&](int i, __m128i codes, long k) {
    // NaN codes of e4m3 are only noted here: one of them makes the whole dot product NaN
    if (!E5) top[i] = _mm_max_epu8(top[i], _mm_and_si128(codes, _mm_set1_epi8(0x7f)));
    vf x[PARTS];
    floats16(halves<E5, false>(codes), x);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < PARTS; ++p) acc[r][i][p] = fma(load(a + r * pitch + k + p * VW), x[p], acc[r][i][p]);
  };
  long k = 0;
  for (; k + 16 <= K; k += 16)
    for (int i = 0; i < C; ++i) {
      if (k % 64 == 0) _mm_prefetch((const char*)(w + (i + AHEAD) * ldw + k), _MM_HINT_T0);
      step(i, _mm_loadu_si128((const __m128i*)(w + i * ldw + k)), k);
    }
  if (k < K)
    for (int i = 0; i < C; ++i) step(i, codes16(w + i * ldw + k, K - k), k);
  for (int i = 0; i < C; ++i) {
    const bool nan = !E5 && _mm_movemask_epi8(_mm_cmpeq_epi8(top[i], _mm_set1_epi8(0x7f)));
    for (int r = 0; r < R; ++r) {
      float sum = total(acc[r][i][0]);
      for (int p = 1; p < PARTS; ++p) sum += total(acc[r][i][p]);
      c[r * NB + i] = nan ? real(0x7fc00000u) : sum * half_scale<E5>();
    }
  }
}

// How the few rows are multiplied: `dots` with its element, pitch and conversion of A, and the columns of W
// worked on side by side, as many as hide the latency of a multiplication while their sums fit in registers.

struct FloatDots {
  typedef float T;
  template <int R> static constexpr int columns() { return VW < 16 ? (R > 2 ? 1 : 4 / R) : R == 1 ? 8 : 4; }
  static long size(const Job& j) { return Fp32::size(j); }
  static long pitch(const Job& j) { return Fp32::pitch(j); }
  template <bool E5> static void convert(const Job& j, long m, float* a) { Fp32::convert<E5>(j, m, a); }
  template <bool E5, int R, int C> struct Dots {
    static void run(const float* a, long pitch, const u8* w, long ldw, long K, float* c) {
      dots<E5, R, C>(a, pitch, w, ldw, K, c);
    }
  };
};

#ifdef FP8PASS_BYTE_TABLES
struct PairDots {
  typedef u16 T;
  template <int R> static constexpr int columns() { return R == 1 ? 8 : 4; }
  static long pitch(const Job& j) { return round_up(j.K, 64) + 32; }
  static long size(const Job& j) { return j.M * pitch(j); }
  template <bool E5> static void convert(const Job& j, long m, u16* a) {
    u16* row = a + m * pitch(j);
    convert_row<E5>(j.a + m * j.lda, j.K, round_up(j.K, 64), row);
    for (long k = 0; k < j.K; k += 64) {  // into the order in which bf16_codes() hands out W
      const __m512i x = _mm512_loadu_si512(row + k), y = _mm512_loadu_si512(row + k + 32);
      _mm512_storeu_si512(row + k, _mm512_shuffle_i64x2(x, y, 0x88));
      _mm512_storeu_si512(row + k + 32, _mm512_shuffle_i64x2(x, y, 0xdd));
    }
  }
  // How many rows ahead of those worked on to prefetch: about 24 KiB. Memory that is not there is not read.
  template <int C> static long prefetched(long ldw) {
    const long rows = (24 << 10) / (ldw > 64 ? ldw : 64);
    return rows < C ? C : rows;
  }
  // c[r][i] = A[r] . W[i] for R rows of A (bf16, zero padded, in that order) and C rows of W (fp8)
  template <bool E5, int R, int C> struct Dots {
    static void run(const u16* a, long pitch, const u8* w, long ldw, long K, float* c) {
      const long ahead = prefetched<C>(ldw) * ldw;
      const ByteTables<E5> tables;
      vf acc[R][C];
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < C; ++i) acc[r][i] = splat(0);
      const auto step = [&](int i, __m512i codes, long k) {
        __m512i x, y;
        tables.bf16(codes, x, y);
        for (int r = 0; r < R; ++r) {
          const __m512bh low = (__m512bh)_mm512_loadu_si512(a + r * pitch + k);
          const __m512bh high = (__m512bh)_mm512_loadu_si512(a + r * pitch + k + 32);
          acc[r][i] = _mm512_dpbf16_ps(acc[r][i], low, (__m512bh)x);
          acc[r][i] = _mm512_dpbf16_ps(acc[r][i], high, (__m512bh)y);
        }
      };
      long k = 0;
      for (; k + 64 <= K; k += 64)
        for (int i = 0; i < C; ++i) {
          _mm_prefetch((const char*)(w + ahead + i * ldw + k), _MM_HINT_T0);
          step(i, _mm512_loadu_si512(w + i * ldw + k), k);
        }
      if (k < K) {
        const __mmask64 rest = ~0ull >> (64 - (K - k));
        for (int i = 0; i < C; ++i) step(i, _mm512_maskz_loadu_epi8(rest, w + i * ldw + k), k);
      }
      for (int i = 0; i < C; ++i)
        for (int r = 0; r < R; ++r) c[r * NB + i] = total(acc[r][i]);
    }
  };
};
#endif

template <class P, bool E5, int R> void gemv(const Job& j, const typename P::T* a) {
  constexpr int C = P::template columns<R>();
  parallel(j.threads, (j.N + NB - 1) / NB, [&](auto draw) {
    for (long block; (block = draw()) >= 0;) {
      const long n0 = block * NB, n = j.N - n0 < NB ? j.N - n0 : NB, pitch = P::pitch(j);
      const u8* w = j.w + n0 * j.ldw;
      alignas(64) float c[R * NB] = {};
      long i = 0;
      for (; i + C <= n; i += C)
        P::template Dots<E5, R, C>::run(a, pitch, w + i * j.ldw, j.ldw, j.K, c + i);
      for (; i < n; ++i) P::template Dots<E5, R, 1>::run(a, pitch, w + i * j.ldw, j.ldw, j.K, c + i);
      finish(j, Columns(j, n0, n), 0, R, n0, n, c);
    }
  });
}

template <class P, bool E5> bool few_rows(const Job& j) {
  typename P::T* a = activations.get<typename P::T>(P::size(j));
  if (!a) return false;
  for (long m = 0; m < j.M; ++m)
    j.a_e5 ? P::template convert<true>(j, m, a) : P::template convert<false>(j, m, a);
  if (j.M == 1) gemv<P, E5, 1>(j, a);
  else if (j.M == 2) gemv<P, E5, 2>(j, a);
  else if (j.M == 3) gemv<P, E5, 3>(j, a);
  else gemv<P, E5, 4>(j, a);
  activations.trim();
  return true;
}

template <class P> bool few_rows(const Job& j) { return j.w_e5 ? few_rows<P, true>(j) : few_rows<P, false>(j); }

int kernels() {  // bit i: kernel i of Isa can run here; bit 0: more than one thread can be used
  int found = (GOMP_parallel ? 1 : 0) | 1 << FP32 | 1 << GEMV;
#ifdef FP8PASS_BF16
  found |= 1 << BF16;
#endif
#ifdef FP8PASS_BYTE_TABLES
  found |= 1 << GEMV_BF16;
#endif
#ifdef FP8PASS_AMX
  if (Amx::permitted()) found |= 1 << AMX;
#endif
  return found;
}

}  // namespace

extern "C" int fp8pass_kernels() { return kernels(); }

// One argument, an array of 14 numbers, because converting arguments is what a call from Python spends its
// time on: A, lda, W, ldw, packed or 0, scale_a, scale_b, bias or 0, out, M, N, K, flags, threads.
// `flags`, from bit 0: A is e5m2, W is e5m2, scale_a per row, scale_b per column, 2 bits bias type, 2 bits
// result type, 3 bits Isa (0: choose). Returns 0, 1 (out of memory) or 2 (this kernel cannot run here).
extern "C" int fp8pass_scaled_mm(const int64_t* x) {
  const auto at = [x](int i) { return reinterpret_cast<const void*>(x[i]); };
  const long M = x[9], N = x[10], K = x[11], flags = x[12], threads = x[13];
  Job j{static_cast<const u8*>(at(0)), static_cast<const u8*>(at(2)), static_cast<const u16*>(at(4)),
        static_cast<const float*>(at(5)), static_cast<const float*>(at(6)), at(7),
        reinterpret_cast<void*>(x[8]), M, N, K, round_up(K, KR), long(x[1]), long(x[3]), threads,
        bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8), int(flags >> 4 & 3),
        int(flags >> 6 & 3)};
  const double useful = double(M) * double(N) * double(K) / 2e5 + 1;  // a thread less than ~10 us costs more
  if (useful < double(threads)) j.threads = long(useful);
  int isa = int(flags >> 8 & 7);
  const int can = kernels();
  if (isa == AUTO) {
    if (M <= GEMV_ROWS) isa = can >> GEMV_BF16 & 1 ? GEMV_BF16 : GEMV;
    else isa = can >> AMX & 1 ? AMX : can >> BF16 & 1 ? BF16 : FP32;
  }
  if (!(can >> isa & 1)) return 2;
  if ((isa == GEMV || isa == GEMV_BF16) && M > GEMV_ROWS) return 2;
  if (isa == GEMV) return !few_rows<FloatDots>(j);
#ifdef FP8PASS_BYTE_TABLES
  if (isa == GEMV_BF16) return !few_rows<PairDots>(j);
#endif
#ifdef FP8PASS_AMX
  if (isa == AMX) return !product<Amx>(j);
#endif
#ifdef FP8PASS_BF16
  if (isa == BF16) return !product<Bf16>(j);
#endif
  return !product<Fp32>(j);
}
