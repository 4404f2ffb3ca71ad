// Stand-alone: few_rows and many_rows beside a float64 product (no argument: and times, "time": only those, "tiny": for the sanitizers).
// nvcc -std=c++20 -O3 --fmad=false --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -Isrc -Iinclude -cudart static THIS -ldl
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "draft_kv/cuda/features.cuh"
#include "draft_kv/cuda/few_rows.cuh"
#include "draft_kv_programs.cuh"
using namespace specstate;
using namespace specstate::draft_kv;
using namespace specstate::draft_kv::cuda;
typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                           const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode encode;
CUtensorMap make_map(const void* w, int64_t rows, int64_t hidden, int jh, bool promote = true) {
  CUtensorMap m;
  cuuint64_t dims[2] = {(cuuint64_t)hidden, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)hidden * 2};
  cuuint32_t box[2] = {64, (cuuint32_t)(jh ? jh * 32 : 16)}, es[2] = {1, 1};
  CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)w, dims, strides, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      CU_TENSOR_MAP_SWIZZLE_128B, promote ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) {
    printf("encode %d\n", r);
    exit(1);
  }
  return m;
}
// double product: one warp per (row, col) strip
__global__ void ref_product(const __nv_bfloat16* x, const __nv_bfloat16* w, const __nv_bfloat16* bias, double* out, float* sums, int T,
                            int N, int H) {
  int col = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int t0 = blockIdx.y * 8; t0 < T; t0 += gridDim.y * 8) {
    double s[8] = {}, m[8] = {};
    for (int k = lane; k < H; k += 32) {
      double wv = __bfloat162float(w[(int64_t)col * H + k]);
      for (int j = 0; j < 8; j++)
        if (t0 + j < T) {
          double v = wv * (double)__bfloat162float(x[(int64_t)(t0 + j) * H + k]);
          s[j] += v, m[j] += fabs(v);
        }
    }
    for (int j = 0; j < 8; j++) {
      for (int d = 16; d; d /= 2) s[j] += __shfl_xor_sync(~0u, s[j], d), m[j] += __shfl_xor_sync(~0u, m[j], d);
      if (lane == 0 && t0 + j < T)
        out[(int64_t)(t0 + j) * N + col] = s[j] + (bias ? __bfloat162float(bias[col]) : 0.0f), sums[(int64_t)(t0 + j) * N + col] = m[j];
    }
  }
}
// compare: one thread per (row, head)
// bad: V further from the exact sum than half a unit of its rounding and 2^-19 of the sum of |x w|; K further than 3 units of its pair (what one unit of the projection becomes, and a rounding), of a channel that is not turned and near zero (what is left of a cancelled sum) of 2^-6
__global__ void compare(const double* proj, const float* sums, const __nv_bfloat16* norm, const float* eps, const float* table,
                        const int64_t* pos, const int64_t* slot, const int* written, const __nv_bfloat16* kp, const __nv_bfloat16* vp,
                        int T, int L, int N, int D, int R, bool neox, bool ran, int64_t slots, unsigned long long* stat) {
  int64_t id = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  int G = L * 2 * N;
  if (id >= (int64_t)T * G) return;
  int t = id / G, h = id % G;
  int l = h / (2 * N), r = h % (2 * N);
  bool isv = r >= N;
  int hd = isv ? r - N : r;
  if (!written[t]) return;
  const double* p = proj + (int64_t)t * G * D + (int64_t)h * D;
  double y[128];
  for (int i = 0; i < D; i++) y[i] = rb(p[i]);
  const __nv_bfloat16* got = (isv ? vp : kp) + (((int64_t)l * slots + slot[t]) * N + hd) * D;
  if (isv) {
    for (int i = 0; i < D; i++) {
      double g = __bfloat162float(got[i]);
      atomicAdd(&stat[0], 1);
      if (g != y[i]) {
        atomicAdd(&stat[1], 1);
        int e;
        frexp(y[i], &e);
        double unit = ldexp(1.0, e - 8);
        if (!(fabs(g - p[i]) <= 0.51 * unit + ldexp(1.0, -19) * sums[p - proj + i])) atomicAdd(&stat[2], 1);
      }
    }
    return;
  }
  double ss = 0;
  for (int i = 0; i < D; i++) ss += y[i] * y[i];
  double s = 1 / sqrt(ss / D + eps[l]);
  double z[128];
  for (int i = 0; i < D; i++) {
    y[i] = y[i] * s * (double)__bfloat162float(norm[l * D + i]);
    if (ran) y[i] = rb(y[i]);
    z[i] = y[i];
  }
  for (int i = 0; i < R / 2; i++) {
    int a = neox ? i : 2 * i, b = neox ? i + R / 2 : 2 * i + 1;
    double c = table[pos[t] * R + i], sn = table[pos[t] * R + R / 2 + i];
    z[a] = y[a] * c - y[b] * sn;
    z[b] = y[b] * c + y[a] * sn;
  }
  for (int i = 0; i < D; i++) {
    double g = __bfloat162float(got[i]), w = rb(z[i]);
    atomicAdd(&stat[3], 1);
    if (g != w) {
      atomicAdd(&stat[4], 1);
      double m = fmax(fabs(z[i]), 1.0 / 64);
      int f;
      if (i < R) {
        double o = z[neox ? (i < R / 2 ? i + R / 2 : i - R / 2) : i ^ 1];
        m = sqrt(z[i] * z[i] + o * o);
      }
      frexp(m, &f);
      double u = fabs(g - w) / ldexp(1.0, f - 8);
      if (!(u <= 3.01)) atomicAdd(&stat[5], 1);
    }
  }
}
// bandwidth probe: same boxes, no product. slices: how a row's features are split over neighbouring blocks.
__global__ void __launch_bounds__(64, 1) probe(const __grid_constant__ CUtensorMap w, int tiles, int slices, int stages, int depth_total,
                                               int box_jh, int order, int rotate, int pair) {
  extern __shared__ unsigned char sm[];
  auto* mem = (unsigned char*)(((uintptr_t)sm + 1023) & ~1023ull);
  __shared__ uint64_t full[32], empty[32];
  int bytes = box_jh * 32 * 128 * pair;
  int units = tiles * 4 / box_jh;
  int groups = gridDim.x / slices, g = blockIdx.x / slices, r = blockIdx.x % slices;
  int ub = (int64_t)g * units / groups, ue = (int64_t)(g + 1) * units / groups;
  int kb = r * depth_total / slices, depth = (r + 1) * depth_total / slices - kb;
  int loads = (ue - ub) * depth / pair;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      ptx::barrier_init(&full[i], 1);
      ptx::barrier_init(&empty[i], 1);
    }
    ptx::fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t pol = order ? ptx::evict_first() : ptx::evict_last();
    for (int i = 0; i < loads; i++) {
      int st = i % stages;
      ptx::barrier_wait(&empty[st], (i / stages + 1) & 1);
      ptx::barrier_expect(&full[st], bytes);
      for (int half = 0; half < pair; half++)
        tile_load(mem + st * bytes + half * (bytes / pair), w, (kb + (i * pair + half + (int)blockIdx.x * rotate) % depth) * 64,
                  (ub + i * pair / depth) * box_jh * 32, &full[st], pol);
    }
  } else if (threadIdx.x == 32) {
    for (int i = 0; i < loads; i++) {
      int st = i % stages;
      ptx::barrier_wait(&full[st], (i / stages) & 1);
      ptx::barrier_arrive(&empty[st]);
    }
  }
}
// pairs of blocks (neighbours, or a cluster): block r of pair p reads half r of the features of 160 rows, as boxes of 128 and 32; kind 1: all features of 80 rows, boxes of 64 and 16
__global__ void __launch_bounds__(64, 1)
    probe_pairs(const __grid_constant__ CUtensorMap big, const __grid_constant__ CUtensorMap small, int kind, int stages, int total) {
  extern __shared__ unsigned char sm[];
  auto* mem = (unsigned char*)(((uintptr_t)sm + 1023) & ~1023ull);
  __shared__ uint64_t full[32], empty[32];
  int rows = kind ? 80 : 160, first = kind ? 64 : 128, bytes = rows * 128, pair = blockIdx.x / 2, r = blockIdx.x % 2;
  int row0 = kind ? blockIdx.x * 80 : pair * 160, kb = kind ? 0 : r * total / 2, loads = kind ? total : total / 2;
  if (row0 >= 10240) loads = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      ptx::barrier_init(&full[i], 1);
      ptx::barrier_init(&empty[i], 1);
    }
    ptx::fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t pol = ptx::evict_first();
    for (int i = 0; i < loads; i++) {
      int st = i % stages;
      ptx::barrier_wait(&empty[st], (i / stages + 1) & 1);
      ptx::barrier_expect(&full[st], bytes);
      tile_load(mem + st * bytes, big, (kb + i) * 64, row0, &full[st], pol);
      tile_load(mem + st * bytes + first * 128, small, (kb + i) * 64, row0 + first, &full[st], pol);
    }
  } else if (threadIdx.x == 32) {
    for (int i = 0; i < loads; i++) {
      int st = i % stages;
      ptx::barrier_wait(&full[st], (i / stages) & 1);
      ptx::barrier_arrive(&empty[st]);
    }
  }
}
__global__ void __launch_bounds__(512) stream(const uint4* x, int64_t n, uint4* sink) {
  uint4 a = {};
  int64_t i = blockIdx.x * 4096ll + threadIdx.x;
  for (; i < n; i += gridDim.x * 4096ll) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = i + j * 512 < n ? ptx::load_streaming(x + i + j * 512) : uint4{};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      a.x ^= v[j].x;
      a.y ^= v[j].y;
      a.z ^= v[j].z;
      a.w ^= v[j].w;
    }
  }
  if (a.x == 0x12345 && a.y == 0x777) *sink = a;
}
static Row* g_list;
static bool failed = false;
CUtensorMap rows_map(const void* x, int64_t rows, int64_t hidden, int64_t stride, int box_rows = 128) {
  CUtensorMap m;
  cuuint64_t dims[2] = {(cuuint64_t)hidden, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
  cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, es[2] = {1, 1};
  CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)x, dims, strides, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) {
    printf("encode rows %d\n", r);
    exit(1);
  }
  return m;
}
static bool g_pdl = false;
template <int D, int G>
void launch_many_g(const CUtensorMap& m, const Problem& all, int sms = 132) {
  auto k = many_rows<core::bfloat16, D, G>;
  SPECSTATE_CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448));
  const ManyShape s = many_shape<G>({all.layers * 2 * all.heads * D / 128, Runs::of(all.hidden)}, all.rows.tokens, 232448);
  const int each = (s.head_tiles + sms - 1) / sms;
  cudaLaunchConfig_t c{};
  c.gridDim = (s.head_tiles + each - 1) / each;
  c.blockDim = Many<G>::kThreads;
  c.dynamicSmemBytes = many_shared_bytes<G>(s.stages, s.box);
  c.stream = st;
  cudaLaunchAttribute a[1];
  c.attrs = a;
  if (g_pdl) {
    a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a[0].val.programmaticStreamSerializationAllowed = 1;
    c.numAttrs = 1;
  }
  SPECSTATE_CK(cudaLaunchKernelEx(&c, k, m, rows_map(all.ctx, all.rows.tokens, all.hidden, all.ctx_stride, s.box), all, s));
}
template <int D>
void launch_many(int G, const CUtensorMap& m, const Problem& p, int sms = 132) {
  if (G == 1) launch_many_g<D, 1>(m, p, sms);
  if (G == 2) launch_many_g<D, 2>(m, p, sms);
}
static int g_stages = 0, g_prefetched = 6;
template <int D, bool kEarly, int kNarrow>
void launch_few_as(const CUtensorMap& m, const CUtensorMap& quarter, const Problem& p, Runs runs, const LayerPlaces& deal,
                   Context context) {
  const auto k = few_rows<core::bfloat16, D, kEarly, kNarrow>;
  using F = Few<D, kNarrow>;
  SPECSTATE_CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448));
  const int T = p.rows.tokens;
  static int n = 0;
  cudaLaunchConfig_t c{};
  cudaLaunchAttribute a[2];
  a[0].id = cudaLaunchAttributeClusterDimension;
  a[0].val.clusterDim.x = 2;
  a[0].val.clusterDim.y = a[0].val.clusterDim.z = 1;
  c.attrs = a;
  c.numAttrs = 1;
  c.blockDim = F::kThreads;
  c.stream = st;
  c.dynamicSmemBytes = 232448;
  c.gridDim = 2;
  if (!n) {
    SPECSTATE_CK(cudaOccupancyMaxActiveClusters(&n, k, &c));
    printf("few_rows<%d>: %d clusters\n", D, n);
  }
  FewShape s{runs};
  s.stages = g_stages;
  s.prefetched = g_prefetched;
  if (D == 0) {
    s.wide = 64, s.places = context.hidden / 64;
  } else {
    s.deal = deal;
    s.places = D == 128 ? s.deal.used : p.layers * p.heads;
  }
  s = F::fitted(s, T, 232448);
  c.gridDim = 2 * std::min(n, s.places);
  c.dynamicSmemBytes = F::shared_bytes(s);
  if (g_pdl) {
    a[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a[1].val.programmaticStreamSerializationAllowed = 1;
    c.numAttrs = 2;
  }
  SPECSTATE_CK(cudaLaunchKernelEx(&c, k, m, quarter, rows_map(p.ctx, T, p.hidden, p.ctx_stride, s.tokens), s, p, context));
}
CUtensorMap make_map(const void* w, int64_t rows, int64_t hidden, int jh, bool promote);
template <int D, bool kEarly = false>
void launch_few_of(const CUtensorMap& m, const CUtensorMap& quarter, const Problem& p, Runs runs, Context context = {},
                   const CUtensorMap* half = nullptr) {
  LayerPlaces deal;
  if constexpr (D == 128) {
    deal = LayerPlaces::of(p.layers, p.heads, 66);
    if (deal.width == 6) return launch_few_as<128, kEarly, 64>(m, half ? *half : quarter, p, runs, deal, context);
    launch_few_as<128, kEarly, 32>(m, quarter, p, runs, deal, context);
  } else {
    launch_few_as<D, kEarly, 0>(m, quarter, p, runs, deal, context);
  }
}
template <int D>
void launch_few(const CUtensorMap& m, const CUtensorMap& quarter, const Problem& p, const CUtensorMap* half = nullptr) {
  launch_few_of<D>(m, quarter, p, Runs::of(p.hidden), {}, half);
}
/// Behind fc: its norm, and the projection.
void launch_projection(const CUtensorMap& m, const CUtensorMap& quarter, const Problem& p, Runs runs, const Context& context,
                       const CUtensorMap* half) {
  cudaLaunchConfig_t c{};
  cudaLaunchAttribute a[1];
  a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a[0].val.programmaticStreamSerializationAllowed = 1;
  c.attrs = a, c.numAttrs = g_pdl, c.gridDim = p.rows.tokens, c.blockDim = kNormalizeThreads, c.stream = st;
  SPECSTATE_CK(cudaLaunchKernelEx(&c, normalize_rows<core::bfloat16, 4>, context, static_cast<const int*>(nullptr)));
  launch_few_of<128, true>(m, quarter, p, runs, context, half);
}
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  bool quick = argc > 1, timing = quick && !strcmp(argv[1], "time"), tiny = quick && !strcmp(argv[1], "tiny"),
       few = argc > 2 && !strcmp(argv[2], "few");
  SPECSTATE_CK(cudaMalloc(&g_list, kListRows * 16 + 64));
  SPECSTATE_CK(cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kPlanBytes));
  SPECSTATE_CK(cudaStreamCreate(&st));
  cudaDriverEntryPointQueryResult q;
  void* f;
  SPECSTATE_CK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &q));
  encode = (Encode)f;
  unsigned long long* stat = dev<unsigned long long>(16);
  int* flag = dev<int>(2);
  SPECSTATE_CK(cudaMemset(flag, 0, 8));
  auto check = [&](const char* name, int H, int L, int N, int D, int R, int T, int W, bool neox, bool ran, bool usebias, int many_only) {
    int G = L * 2 * N;
    int64_t rows = (int64_t)G * D;
    int64_t slots = 2 * T + 16;
    auto* w = dev<__nv_bfloat16>(rows * H);
    auto* x = dev<__nv_bfloat16>((int64_t)T * H);
    auto* norm = dev<__nv_bfloat16>(L * D);
    auto* bias = dev<__nv_bfloat16>(rows);
    auto* eps = dev<float>(L);
    int P = 4096;
    auto* table = dev<float>(P * R);
    auto* pos = dev<int64_t>(T);
    auto* slot = dev<int64_t>(T);
    int* written = dev<int>(T);
    auto* commit = dev<int>(T);
    fill<<<1024, 256, 0, st>>>(w, rows * H, 1 / sqrtf(H), 0, 1);
    fill<<<256, 256, 0, st>>>(x, (int64_t)T * H, 1, 0, 2);
    fill<<<1, 256, 0, st>>>(norm, L * D, 0.3f, 1, 3);
    fill<<<64, 256, 0, st>>>(bias, rows, 0.5f, 0, 4);
    std::vector<float> he(L, 1e-6f), ht(P * R);
    for (int i = 0; i < P; i++)
      for (int j = 0; j < R / 2; j++) {
        float a = i * (float)(1 / pow(1e4, 2.0 * j / R));
        ht[i * R + j] = cosf(a);
        ht[i * R + R / 2 + j] = sinf(a);
      }
    std::vector<int64_t> hp(T), hs(T);
    std::vector<int> hw(T), hc(T, 0);
    srand(7);
    std::vector<int64_t> perm(slots);
    for (int i = 0; i < slots; i++) perm[i] = i;
    for (int i = slots - 1; i > 0; i--) std::swap(perm[i], perm[rand() % (i + 1)]);
    for (int i = 0; i < T; i++) {
      hp[i] = rand() % P;
      hs[i] = perm[i];
      if (many_only == 2) continue;
      if (rand() % 8 == 0) hs[i] = -3;
      if (i > 8 && rand() % 8 == 0) hs[i] = hs[rand() % i];
    }
    int win = W ? W : T;
    if (W)
      for (int i = 0; i < T / W; i++) hc[i] = rand() % (W + 1);
    for (int i = 0; i < T; i++) hw[i] = hs[i] >= 0 && (!W || i % win < hc[i / win]);
    for (int i = 0; i < T; i++)
      if (hw[i])
        for (int j = i + 1; j < T; j++)
          if (hw[j] && hs[j] == hs[i]) {
            hw[i] = 0;
            break;
          }
    std::vector<unsigned char> named(slots, 0);
    int cnt = 0;
    for (int i = 0; i < T; i++)
      if (hw[i]) named[hs[i]] = 1, cnt++;
    auto* dn = dev<unsigned char>(slots);
    SPECSTATE_CK(cudaMemcpy(dn, named.data(), slots, cudaMemcpyHostToDevice));
    SPECSTATE_CK(cudaMemcpy(eps, he.data(), L * 4, cudaMemcpyHostToDevice));
    SPECSTATE_CK(cudaMemcpy(table, ht.data(), ht.size() * 4, cudaMemcpyHostToDevice));
    SPECSTATE_CK(cudaMemcpy(pos, hp.data(), T * 8, cudaMemcpyHostToDevice));
    SPECSTATE_CK(cudaMemcpy(slot, hs.data(), T * 8, cudaMemcpyHostToDevice));
    SPECSTATE_CK(cudaMemcpy(written, hw.data(), T * 4, cudaMemcpyHostToDevice));
    SPECSTATE_CK(cudaMemcpy(commit, hc.data(), T * 4, cudaMemcpyHostToDevice));
    auto* proj = dev<double>((int64_t)T * rows);
    auto* sums = dev<float>((int64_t)T * rows);
    ref_product<<<dim3(rows / 8, std::min((T + 7) / 8, 16)), 256, 0, st>>>(x, w, usebias ? bias : nullptr, proj, sums, T, rows, H);
    int64_t pool = (int64_t)L * slots * N * D;
    uint16_t *kp[5], *vp[5];
    for (int i = 0; i < 5; i++) {
      kp[i] = dev<uint16_t>(pool);
      vp[i] = dev<uint16_t>(pool);
      SPECSTATE_CK(cudaMemset(kp[i], 0x5A, pool * 2));
      SPECSTATE_CK(cudaMemset(vp[i], 0x5A, pool * 2));
    }
    CUtensorMap m4 = make_map(w, rows, H, 4), m1 = make_map(w, rows, H, 1), m2 = make_map(w, rows, H, 2);
    int first_ran = -1;
    static const char* names[5] = {"few_rows", "1 group", "2 groups", "2, 7 blocks", "1, 3 blocks"};
    for (int v = 0; v < 5; v++) {
      if (v == 0 && (!few || T > 64)) continue;
      if (T > ((v == 1 || v == 4) ? 64 : 128)) continue;
      Problem p{};
      p.rows = {{slot, true, W > 0, W, 1}, {pos, true, false, 0, 1}, {W ? commit : nullptr, false, false, 0, 1}, 0, T, win, slots, P, flag};
      p.ctx = x;
      p.ctx_stride = H;
      p.hidden = H;
      p.heads = N;
      p.layers = L;
      p.first_layer = 0;
      if (usebias) p.bias = {bias, DType::kBFloat16, 1};
      p.bias_layer = 2 * N * D;
      p.norm = {norm, DType::kBFloat16, 1};
      p.norm_layer = D;
      p.eps = {eps, DType::kFloat32, 1};
      p.table = table;
      p.table_row = R;
      p.table_layer = 0;
      p.rotary_dim = R;
      p.is_neox_style = neox;
      p.round_after_norm = ran;
      p.k_dtype = p.v_dtype = DType::kBFloat16;
      p.k_wide = p.v_wide = true;
      for (int l = 0; l < L; l++) {
        p.target[0][l] = {{kp[v] + l * slots * N * D, (int64_t)N * D, D, 1}, 1};
        p.target[1][l] = {{vp[v] + l * slots * N * D, (int64_t)N * D, D, 1}, 1};
      }
      const int of[5] = {0, 1, 2, 2, 1}, sms = v < 3 ? 132 : v == 4 ? 3 : 7;
      if (v == 0) {
        if (D == 128)
          launch_few<128>(m4, m1, p, &m2);
        else
          launch_few<64>(m4, m1, p);
      } else if (D == 128)
        launch_many<128>(of[v], m4, p, sms);
      else
        launch_many<64>(of[v], m4, p, sms);
      cudaError_t e = cudaStreamSynchronize(st);
      if (e) {
        printf("%s form %d: %s\n", name, v, cudaGetErrorString(e));
        exit(1);
      }
      SPECSTATE_CK(cudaMemsetAsync(stat, 0, 128, st));
      compare<<<((int64_t)T * G + 127) / 128, 128, 0, st>>>(proj, sums, norm, eps, table, pos, slot, written, (__nv_bfloat16*)kp[v],
                                                            (__nv_bfloat16*)vp[v], T, L, N, D, R, neox, ran, slots, stat);
      stray<<<512, 256, 0, st>>>(kp[v], pool, slots, N * D, dn, stat + 6);
      stray<<<512, 256, 0, st>>>(vp[v], pool, slots, N * D, dn, stat + 6);
      if (first_ran < 0) first_ran = v;
      differ<<<512, 256, 0, st>>>(kp[v], kp[first_ran], pool, stat + 7);
      differ<<<512, 256, 0, st>>>(vp[v], vp[first_ran], pool, stat + 7);
      unsigned long long s[16];
      SPECSTATE_CK(cudaMemcpyAsync(s, stat, 128, cudaMemcpyDeviceToHost, st));
      SPECSTATE_CK(cudaStreamSynchronize(st));
      failed |= s[2] || s[5] || s[6] || s[7] || 100.0 * s[1] > 0.1 * std::max(s[0], 20000ull);
      printf(
          "%-16s %-12s rows %4d/%4d: V %llu off %.4f%% bad %llu | K off %.3f%% bad %llu | stray %llu | differs from the first form %llu\n",
          name, names[v], cnt, T, s[0], 100.0 * s[1] / std::max(1ull, s[0]), s[2], 100.0 * s[4] / std::max(1ull, s[3]), s[5], s[6], s[7]);
    }
    for (void* p : {(void*)w, (void*)x, (void*)norm, (void*)bias, (void*)eps, (void*)table, (void*)pos, (void*)slot, (void*)written,
                    (void*)commit, (void*)dn, (void*)proj, (void*)sums})
      cudaFree(p);
    for (int i = 0; i < 5; i++) {
      cudaFree(kp[i]);
      cudaFree(vp[i]);
    }
  };
  bool trace_run = quick && !strcmp(argv[1], "trace"), cold_run = quick && !strcmp(argv[1], "cold");
  if (trace_run || cold_run) timing = true;
  g_flush = dev<uint4>(kFlush / 16);
  if (!timing) {
    if (!tiny) {
      check("8B", 4096, 5, 8, 128, 128, 1, 0, true, false, false, 0);
      check("8B", 4096, 5, 8, 128, 128, 16, 0, true, false, false, 0);
      check("8B bias ran", 4096, 5, 8, 128, 128, 64, 16, true, true, true, 0);
      check("4B partial", 2560, 5, 8, 128, 64, 37, 0, true, false, false, 0);
    }
    check("interleaved", 1024, 2, 8, 128, 128, 64, 0, false, false, true, 0);
    check("interleaved 64", 1024, 2, 8, 128, 64, 64, 0, false, false, true, 0);
    for (int T : {1, 5, 8, 9, 24}) check("few", 512, 2, 2, 128, 128, T, 0, true, false, true, 0);
    check("two places", 512, 10, 8, 128, 128, 40, 0, true, false, false, 0);
    check("two places, 7 rows", 512, 10, 8, 128, 128, 7, 0, true, false, true, 0);
    check("three places", 512, 10, 32, 64, 64, 64, 0, true, false, false, 0);
    check("R32", 1024, 2, 2, 128, 32, 50, 0, true, false, false, 0);
    check("192 columns", 1024, 6, 8, 128, 128, 64, 0, true, false, true, 0);
    check("192 columns, 9 rows", 512, 6, 8, 128, 64, 9, 0, true, false, true, 0);
    check("192 columns, 8 runs", 4160, 6, 8, 128, 128, 40, 8, false, true, true, 0);
    check("D64 N1 R32", 1024, 3, 1, 64, 32, 33, 0, true, false, true, 0);
    check("D64 N3 R64", 576, 3, 3, 64, 64, 64, 8, true, false, false, 0);
    check("D64 inter", 640, 3, 2, 64, 32, 64, 8, false, true, false, 0);
    check("D64 R16", 640, 3, 2, 64, 16, 64, 8, true, true, false, 0);
    if (!tiny) {
      check("K3", 7168, 6, 8, 128, 128, 64, 16, true, false, true, 0);
      for (int T : {1, 7, 16, 33}) check("K3", 7168, 6, 8, 128, 128, T, 0, true, false, false, 0);
      check("K3 4096", 4096, 6, 8, 128, 128, 64, 0, false, true, true, 0);
      check("8B 128", 4096, 5, 8, 128, 128, 128, 16, true, false, true, 0);
      check("D64 100", 1024, 3, 3, 64, 64, 100, 0, true, false, true, 0);
      check("8B 100", 4096, 5, 8, 128, 128, 100, 0, true, false, false, 0);
    }
    check("tiny many", 512, 1, 1, 128, 128, 120, 8, true, false, true, 1);
  }
  printf("%s\n", failed ? "FAILED" : "all forms right");
  if (!timing) return failed;
  // times
  Lt lt;
  lt.init();
  for (int H : {4096, 2560, 7168}) {
    if (argc > 3 && H != atoi(argv[3])) continue;
    const int L = H > 4096 ? 6 : 5, N = 8, D = 128, R = 128;
    const int G = L * 2 * N;
    const int64_t rows = (int64_t)G * D;
    int copies = 3;
    std::vector<__nv_bfloat16*> w(copies);
    for (auto& x : w) {
      x = dev<__nv_bfloat16>(rows * H);
      fill<<<1024, 256, 0, st>>>(x, rows * H, 1 / sqrtf(H), 0, (uint64_t)x);
    }
    int TM = 16384;
    auto* x = dev<__nv_bfloat16>((int64_t)TM * H * 2);
    fill<<<1024, 256, 0, st>>>(x, (int64_t)TM * H * 2, 1, 0, 2);
    int64_t slots = TM + 16;
    auto* kp = dev<uint16_t>(L * slots * N * D);
    auto* vp = dev<uint16_t>(L * slots * N * D);
    auto* norm = dev<__nv_bfloat16>(L * D);
    fill<<<1, 256, 0, st>>>(norm, L * D, 0.3f, 1, 3);
    auto* eps = dev<float>(L);
    SPECSTATE_CK(cudaMemset(eps, 0, L * 4));
    int P = 40960;
    auto* table = dev<float>((int64_t)P * R);
    fill<<<256, 256, 0, st>>>((__nv_bfloat16*)table, (int64_t)P * R * 2, 0.5f, 0, 9);
    auto* pos = dev<int64_t>(TM);
    auto* slot = dev<int64_t>(TM);
    std::vector<int64_t> h(TM), hs(TM);
    for (int i = 0; i < TM; i++) h[i] = i, hs[i] = (i * 7) % slots;
    SPECSTATE_CK(cudaMemcpy(pos, h.data(), TM * 8, cudaMemcpyHostToDevice));
    SPECSTATE_CK(cudaMemcpy(slot, hs.data(), TM * 8, cudaMemcpyHostToDevice));
    auto* y = dev<__nv_bfloat16>((int64_t)TM * rows);
    auto problem = [&](int T, int i) {
      Problem p{};
      p.rows = {{slot, true, false, 0, 1}, {pos, true, false, 0, 1}, {nullptr, false, false, 0, 1}, 0, T, T, slots, P, flag};
      p.ctx = x + (i % 2) * (int64_t)TM * H;
      p.ctx_stride = H;
      p.hidden = H;
      p.heads = N;
      p.layers = L;
      p.norm = {norm, DType::kBFloat16, 1};
      p.norm_layer = D;
      p.eps = {eps, DType::kFloat32, 1};
      p.table = table;
      p.table_row = R;
      p.rotary_dim = R;
      p.is_neox_style = true;
      p.k_dtype = p.v_dtype = DType::kBFloat16;
      p.k_wide = p.v_wide = true;
      for (int l = 0; l < L; l++) {
        p.target[0][l] = {{kp + l * slots * N * D, (int64_t)N * D, D, 1}, 1};
        p.target[1][l] = {{vp + l * slots * N * D, (int64_t)N * D, D, 1}, 1};
      }
      return p;
    };
    std::vector<CUtensorMap> m4, m2, m4n, m2n, m2n2, m1, m64n, m16n;
    for (auto p : w) {
      m4.push_back(make_map(p, rows, H, 4));
      m2.push_back(make_map(p, rows, H, 1));
      m4n.push_back(make_map(p, rows, H, 4, false));
      m2n.push_back(make_map(p, rows, H, 1, false));
      m2n2.push_back(make_map(p, rows, H, 2, false));
      m64n.push_back(make_map(p, rows, H, 2, false));
      m16n.push_back(make_map(p, rows, H, 0, false));
      m1.push_back(make_map(p, rows, H, 1));
    }
    printf("H %d: weights %.1f MB; %.2f us at 4.3 TB/s\n", H, rows * H * 2e-6, rows * H * 2 / 4.3e6);
    for (int g : {132, 264, 528})
      printf("stream %d blocks: %.2f us\n", g,
             time_graph(9, [&](int i) { stream<<<g, 512, 0, st>>>((uint4*)w[i % 3], rows * H / 8, (uint4*)y); }));
    for (int g : {132, 264})
      printf("stream 8 sets of 1/..: small 8MB %d: %.2f us\n", g,
             time_graph(9, [&](int i) { stream<<<g, 512, 0, st>>>((uint4*)w[i % 3], 1 << 19, (uint4*)y); }));
    auto pr = [&](const char* n, std::vector<CUtensorMap>& m, int grid, int slices, int stages, int jh, int rotate, int pair,
                  bool pdl = false) {
      SPECSTATE_CK(cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448 - 1024));
      int smem = std::min(232448 - 1024, stages * pair * jh * 32 * 128 + 1024);
      double us = time_graph(9, [&](int i) { probe<<<grid, 64, smem, st>>>(m[i % 3], G, slices, stages, H / 64, jh, 1, rotate, pair); });
      printf("probe %-22s grid %d slices %d stages %d rows %d rotate %d pair %d: %.2f us\n", n, grid, slices, stages, jh * 32, rotate, pair,
             us);
    };
    auto pairs = [&](int kind, int stages, int cluster, std::vector<CUtensorMap>& big, std::vector<CUtensorMap>& small) {
      SPECSTATE_CK(cudaFuncSetAttribute(probe_pairs, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448 - 1024));
      cudaLaunchConfig_t c{};
      cudaLaunchAttribute a[1];
      a[0].id = cudaLaunchAttributeClusterDimension;
      a[0].val.clusterDim.x = cluster;
      a[0].val.clusterDim.y = a[0].val.clusterDim.z = 1;
      c.attrs = a;
      c.numAttrs = cluster > 1;
      c.gridDim = 128;
      c.blockDim = 64;
      c.stream = st;
      c.dynamicSmemBytes = std::min(232448 - 1024, std::max(stages * (kind ? 80 : 160) * 128 + 1024, 120 * 1024));
      double us =
          time_graph(9, [&](int i) { SPECSTATE_CK(cudaLaunchKernelEx(&c, probe_pairs, big[i % 3], small[i % 3], kind, stages, H / 64)); });
      printf("pairs kind %d cluster %d stages %d (%d KB under way): %.2f us\n", kind, cluster, stages, stages * (kind ? 10 : 20), us);
    };
    if (!trace_run && !cold_run) {
      for (int cl : {1, 2})
        for (int s : {3, 4, 5, 6, 8, 10}) pairs(0, s, cl, m4n, m2n);
      for (int s : {5, 8, 12, 16, 20}) pairs(1, s, 1, m64n, m16n);
      pr("whole rows", m4n, 80, 1, 13, 4, 0, 1);
      pr("whole rows, turned", m4n, 80, 1, 13, 4, 5, 1);
      pr("whole rows, turned", m4n, 80, 1, 13, 4, 1, 1);
      pr("whole rows, 256 bytes", m4n, 80, 1, 6, 4, 0, 2);
      pr("whole rows, promoted", m4, 80, 1, 13, 4, 0, 1);
      pr("whole rows, 256 prom.", m4, 80, 1, 6, 4, 0, 2);
      pr("half rows", m4n, 80, 2, 13, 4, 0, 1);
      pr("8 slices", m4n, 120, 8, 13, 4, 0, 1);
      pr("8 slices turned", m4n, 120, 8, 13, 4, 1, 1);
      pr("4 slices", m4n, 80, 4, 13, 4, 0, 1);
      pr("64 rows", m2n2, 132, 1, 26, 2, 0, 1);
      pr("64 rows 256 bytes", m2n2, 132, 1, 13, 2, 0, 2);
    }
#ifdef SPECSTATE_DRAFT_KV_TRACE
    auto traced = [&](const char* name, std::function<void(int)> call) {
      void* at;
      SPECSTATE_CK(cudaGetSymbolAddress(&at, trace_of));
      static const char* point[kTracePoints] = {"entry",      "barriers", "prefetched", "start", "asked",   "first stage",
                                                "last stage", "summed",   "received",   "left",  "finished"};
      std::vector<long long> v[kTraced][kTracePoints];
      for (int i = 0; i < 8; i++) {
        read_all<<<264, 512, 0, st>>>(g_flush, kFlush / 16, nullptr);
        SPECSTATE_CK(cudaMemsetAsync(at, 0, sizeof(trace_of), st));
        read_all<<<264, 512, 0, st>>>(g_flush, kFlush / 16, nullptr);
        call(i);
        SPECSTATE_CK(cudaStreamSynchronize(st));
        static unsigned long long h[kTraced][132][kTracePoints];
        SPECSTATE_CK(cudaMemcpyFromSymbol(h, trace_of, sizeof h));
        if (i == 0) continue;
        unsigned long long s0 = ~0ull;
        for (int l = 0; l < kTraced; l++)
          for (int b = 0; b < 132; b++)
            if (h[l][b][kEntry]) s0 = std::min(s0, h[l][b][kEntry]);
        for (int l = 0; l < kTraced; l++)
          for (int q = 0; q < kTracePoints; q++)
            for (int b = 0; b < 132; b++)
              if (h[l][b][q]) v[l][q].push_back(h[l][b][q] - s0);
        if (i == 5 && strstr(name, "!"))
          for (int b = 0; b < 132; b++) {
            printf("block %d:", b);
            for (int q = 0; q < kTracePoints; q++) printf(" %lld", h[0][b][q] ? (long long)(h[0][b][q] - s0) : -1);
            printf("\n");
          }
      }
      printf("%s, ns since the first block's entry, (least, median, greatest):\n", name);
      for (int l = 0; l < kTraced; l++) {
        if (v[l][kEntry].empty()) continue;
        printf("  launch %d:", l);
        for (int q = 0; q < kTracePoints; q++) {
          std::sort(v[l][q].begin(), v[l][q].end());
          if (v[l][q].size()) printf("  %s %lld %lld %lld", point[q], v[l][q][0], v[l][q][v[l][q].size() / 2], v[l][q].back());
        }
        printf("\n");
      }
    };
    for (int T : {1, 16, 64}) {
      g_pdl = true;
      char name[64];
      snprintf(name, 64, "few H %d T %d%s", H, T, H == 4096 ? "!" : "");
      traced(name, [&](int i) { launch_few<128>(m4n[i % 3], m2n[i % 3], problem(T, i), &m2n2[i % 3]); });
      g_pdl = false;
    }
    {
      const int64_t F = 5ll * H;
      auto* fc = dev<__nv_bfloat16>(F * H);
      auto* raw = dev<uint16_t>(64ll * H);
      auto* squares = dev<float>(64ll * H / 16);
      auto* hidden_norm = dev<__nv_bfloat16>(H);
      fill<<<1024, 256, 0, st>>>(fc, F * H, 1 / sqrtf(F), 0, 77);
      fill<<<8, 256, 0, st>>>(hidden_norm, H, 0.3f, 1, 78);
      const CUtensorMap mfc = make_map(fc, H, F, 2, false);
      const Context context{raw, squares, {hidden_norm, DType::kBFloat16, 1}, 1e-6f, H};
      for (int T : {1, 16, 64})
        for (int what : {1}) {
          char name[64];
          snprintf(name, 64, "%s H %d T %d", what ? "projection behind fc" : "fc", H, T);
          g_pdl = true;
          traced(name, [&](int i) {
            Problem p = problem(T, i);
            p.ctx_stride = F, p.hidden = F;
            launch_few_of<0>(mfc, m4n[i % 3], p, Runs(kSlices, F / 64), context);
            p.ctx = raw, p.ctx_stride = H, p.hidden = H;
            if (what) launch_projection(m4n[i % 3], m2n[i % 3], p, Runs::of(H), context, &m2n2[i % 3]);
          });
          g_pdl = false;
        }
      cudaFree(fc);
    }
#endif
    if (cold_run) {
      for (int T : {1, 16, 64}) {
        printf("cold H %d T %d:", H, T);
        for (int pre : {0, 4, 6}) {
          g_prefetched = pre, g_pdl = true;
          printf(" (%d prefetched) %.2f", pre,
                 time_cold([&](int i) { launch_few<128>(m4n[i % 3], m2n[i % 3], problem(T, i), &m2n2[i % 3]); }));
        }
        g_prefetched = 6;
        for (int stg : {4}) {
          g_stages = stg;
          printf(" (%d stages) %.2f", stg, time_cold([&](int i) { launch_few<128>(m4n[i % 3], m2n[i % 3], problem(T, i), &m2n2[i % 3]); }));
        }
        g_stages = 0, g_pdl = false;
        printf(" (no pdl) %.2f", time_cold([&](int i) { launch_few<128>(m4n[i % 3], m2n[i % 3], problem(T, i), &m2n2[i % 3]); }));
        if (lt.ok) {
          auto pl = lt.plan(T, rows, H);
          double best = 1e9;
          for (int j = 0; j < std::min(pl.n, 4); j++)
            best = std::min(best, time_cold([&](int i) { lt.run(pl, j, w[i % 3], x + (i % 2) * (int64_t)TM * H, y); }));
          printf(" | cublasLt %.2f", best);
        }
        printf(" | stream %.2f\n", time_cold([&](int i) { stream<<<264, 512, 0, st>>>((uint4*)w[i % 3], rows * H / 8, (uint4*)y); }));
      }
      // features: fc of 5 H, then the projection
      const int64_t F = 5ll * H;
      auto* fc = dev<__nv_bfloat16>(F * H);
      auto* raw = dev<uint16_t>(64ll * H);
      auto* squares = dev<float>(64ll * H / 16);
      auto* hidden_norm = dev<__nv_bfloat16>(H);
      fill<<<1024, 256, 0, st>>>(fc, F * H, 1 / sqrtf(F), 0, 77);
      fill<<<8, 256, 0, st>>>(hidden_norm, H, 0.3f, 1, 78);
      const CUtensorMap mfc = make_map(fc, H, F, 2, false);
      const Context context{raw, squares, {hidden_norm, DType::kBFloat16, 1}, 1e-6f, H};
      for (int T : {1, 16, 64}) {
        printf("cold features H %d T %d:", H, T);
        for (int what : {1, 2, 3}) {
          g_pdl = true;
          printf(" (%s) %.2f",
                 what == 1   ? "fc"
                 : what == 2 ? "raw projection"
                             : "both",
                 time_cold([&](int i) {
                   Problem p = problem(T, i);
                   p.ctx_stride = F, p.hidden = F;
                   if (what != 2) launch_few_of<0>(mfc, mfc, p, Runs(kSlices, F / 64), context);
                   p.ctx = raw, p.ctx_stride = H, p.hidden = H;
                   if (what != 1) launch_projection(m4n[i % 3], m2n[i % 3], p, Runs::of(H), context, &m2n2[i % 3]);
                 }));
        }
        g_pdl = false;
        if (lt.ok) {
          auto pl = lt.plan(T, H, F);
          double best = 1e9;
          for (int j = 0; j < std::min(pl.n, 4); j++) best = std::min(best, time_cold([&](int i) { lt.run(pl, j, fc, x, y); }));
          printf(" | cublasLt fc %.2f", best);
        }
        printf(" | stream fc %.2f\n", time_cold([&](int i) { stream<<<264, 512, 0, st>>>((uint4*)fc, F * H / 8, (uint4*)y); }));
      }
      for (int T : {512, 2048})
        for (int stand : {7, 16}) {
          const int count = T / 16 * stand;
          std::vector<Row> list(count);
          for (int i = 0; i < count; i++) list[i] = {i, i / stand * 16 + i % stand, i};
          SPECSTATE_CK(cudaMemcpy(g_list, list.data(), count * sizeof(Row), cudaMemcpyHostToDevice));
          int* n = (int*)(g_list + kListRows);
          SPECSTATE_CK(cudaMemcpy(n, &count, 4, cudaMemcpyHostToDevice));
          auto* many = dev<uint16_t>(2048ll * H);
          auto* many_squares = dev<float>(2048ll * H / 16);
          const CUtensorMap mwide = make_map(fc, H, F, 4);
          const Context to{many, many_squares, {hidden_norm, DType::kBFloat16, 1}, 1e-6f, H};
          const auto launch = [&](auto groups, int i) {
            using M = ManyFeatures<decltype(groups)::value>;
            const auto k = many_features<core::bfloat16, decltype(groups)::value>;
            Problem p = problem(T, i);
            p.ctx_stride = F, p.hidden = F;
            cudaLaunchConfig_t c{};
            cudaLaunchAttribute a[1];
            a[0].id = cudaLaunchAttributeClusterDimension;
            a[0].val.clusterDim.x = 2;
            a[0].val.clusterDim.y = a[0].val.clusterDim.z = 1;
            c.attrs = a, c.numAttrs = 1;
            const ManyFeaturesShape of{H / 128, g_list, n, Runs(kSlices, F / 64)};
            c.gridDim = 2 * std::min(66, (T + M::kRows - 1) / M::kRows * of.column_tiles), c.blockDim = M::kThreads;
            c.dynamicSmemBytes = M::kShared, c.stream = st;
            SPECSTATE_CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448));
            SPECSTATE_CK(cudaLaunchKernelEx(&c, k, mwide, rows_map(p.ctx, T, F, F, M::kRows), p, of, to));
          };
          const double us = time_cold([&](int i) { launch(std::integral_constant<int, 2>{}, i); }, 4),
                       us3 = time_cold([&](int i) { launch(std::integral_constant<int, 3>{}, i); }, 4);
          double best = 1e9;
          if (lt.ok) {
            auto pl = lt.plan(count, H, F);
            for (int j = 0; j < std::min(pl.n, 2); j++) best = std::min(best, time_cold([&](int i) { lt.run(pl, j, fc, x, y); }, 4));
          }
          printf("many_features H %d T %d of which %d stand: 2 groups %.2f, 3 %.2f | cublasLt %.2f\n", H, T, count, us, us3, best);
          cudaFree(many), cudaFree(many_squares);
        }
      cudaFree(fc);
    }
    if (trace_run || cold_run) continue;
    for (int T : {1, 4, 16, 32, 64, 96, 128}) {
      int n = 9, samples = 11;
      printf("T %d:", T);
      for (int form = 0; form < 5; form++) {  // few_rows; 1 and 2 groups; 1 group overlapping, and with weights fetched in larger pieces
        int gr = form < 3 ? form : 1;
        bool pdl = form == 3;
        double v;
        if (form == 0) {
          if (!few || T > 64) continue;
          for (int pre : {0, 2, 4}) {
            g_prefetched = pre;
            for (bool pdl : {false, true}) {
              g_pdl = pdl;
              v = time_graph(
                  n, [&](int i) { launch_few<128>(m4n[i % 3], m2n[i % 3], problem(T, i), &m2n2[i % 3]); }, samples);
              printf(" few_rows(%d%s) %.2f", pre, pdl ? " pdl" : "", v);
            }
          }
          g_prefetched = 2;
          for (int stg : {4, 6}) {
            g_stages = stg;
            v = time_graph(
                n, [&](int i) { launch_few<128>(m4n[i % 3], m2n[i % 3], problem(T, i), &m2n2[i % 3]); }, samples);
            printf(" few_rows(%d stages pdl) %.2f", stg, v);
          }
          g_stages = 0;
          g_pdl = false;
          continue;
        }
        if (gr == 1 && T > 64) continue;
        g_pdl = pdl;
        v = time_graph(
            n, [&](int i) { launch_many<128>(gr, (form == 4 ? m4 : m4n)[i % 3], problem(T, i)); }, samples);
        g_pdl = false;
        printf(" %d%s %.2f", gr, pdl ? " pdl" : form == 4 ? " promoted" : "", v);
      }
      double best = 1e9;
      if (lt.ok) {
        auto pl = lt.plan(T, rows, H);
        for (int j = 0; j < std::min(pl.n, 4); j++)
          best = std::min(best, time_graph(
                                    n, [&](int i) { lt.run(pl, j, w[i % 3], x + (i % 2) * (int64_t)TM * H, y); }, samples));
      }
      printf(" | cublasLt best of 4 %.2f, floor %.2f\n", best, std::max(rows * H * 2 / 4.3e6, 2.0 * T * rows * H / 850e6));
    }
    for (auto p : w) cudaFree(p);
    cudaFree(x);
    cudaFree(kp);
    cudaFree(vp);
    cudaFree(table);
    cudaFree(y);
  }
  {
    int hf;
    SPECSTATE_CK(cudaMemcpy(&hf, flag, 4, cudaMemcpyDeviceToHost));
    printf("flag %d\n", hf);
  }
}
