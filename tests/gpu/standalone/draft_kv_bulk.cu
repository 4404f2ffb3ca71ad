// Stand-alone: bulk_rows and pair_rows beside a float64 product ("check"; "tiny [PART PARTS]": for the sanitizers; "time"; "cold": as the library's benchmark measures; "trace"; "pairs", "tinypairs", "time pairs": pair_rows).
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

#include "draft_kv/cuda/bulk_rows.cuh"
#include "draft_kv/cuda/half_rows.cuh"
#include "draft_kv/cuda/line_up.cuh"
#include "draft_kv/cuda/pair_rows.cuh"
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
  cuuint32_t box[2] = {64, (cuuint32_t)jh * 32}, es[2] = {1, 1};
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
__global__ void ref_product(const __nv_bfloat16* x, const __nv_bfloat16* w, const __nv_bfloat16* bias, double* out, int T, int N, int H,
                            int row0, int cl) {
  int col = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int t0 = blockIdx.y * 8; t0 < T; t0 += gridDim.y * 8) {
    double s[8] = {};
    for (int k = lane; k < H; k += 32) {
      double wv = __bfloat162float(w[(int64_t)col * H + k]);
      for (int j = 0; j < 8; j++)
        if (t0 + j < T) s[j] += wv * (double)__bfloat162float(x[(int64_t)(t0 + j) * H + k]);
    }
    for (int j = 0; j < 8; j++) {
      for (int d = 16; d; d /= 2) s[j] += __shfl_xor_sync(~0u, s[j], d);
      if (lane == 0 && t0 + j < T) out[(int64_t)(t0 + j) * N + col] = s[j] + (bias ? __bfloat162float(bias[col]) : 0.0f);
    }
  }
}
// compare: one thread per (row, head)
__global__ void compare(const double* proj, const __nv_bfloat16* norm, const float* eps, const float* table, const int64_t* pos,
                        const int64_t* slot, const int* written, const __nv_bfloat16* kp, const __nv_bfloat16* vp, int T, int L, int N,
                        int D, int R, bool neox, bool ran, int64_t slots, unsigned long long* stat) {
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
        double u = fabs(g - y[i]) / ldexp(1.0, e - 8);
        if (!(u <= 1.01)) atomicAdd(&stat[2], 1);
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
      double m = fabs(z[i]);
      int f;
      if (neox && i < R) m = fmax(m, fabs(z[i < R / 2 ? i + R / 2 : i - R / 2]));
      if (!neox && i < R) m = fmax(m, fabs(z[i ^ 1]));
      frexp(m, &f);
      double u = fabs(g - w) / ldexp(1.0, f - 8);
      if (!(u <= 2.01)) atomicAdd(&stat[5], 1);
    }
  }
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
static float* g_parts;
static unsigned long long* g_flags;
static bool g_bulk_pdl = false;
static int g_round = kListRows;  // rows that are lined up at once
template <class K, class... A>
void launch_over(K k, int grid, int block, size_t shared, int cluster, A... args) {
  SPECSTATE_CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
  cudaLaunchConfig_t c{};
  c.gridDim = grid;
  c.blockDim = block;
  c.dynamicSmemBytes = shared;
  c.stream = st;
  cudaLaunchAttribute a[2];
  a[0].id = cudaLaunchAttributeClusterDimension;
  a[0].val.clusterDim = {(unsigned)cluster, 1, 1};
  a[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a[1].val.programmaticStreamSerializationAllowed = 1;
  c.attrs = a;
  c.numAttrs = 1 + g_bulk_pdl;
  SPECSTATE_CK(cudaLaunchKernelEx(&c, k, args...));
}
/// Which rows are written: found out beside the products (only without commit lengths), or those that stand are lined up.
enum Planned { kBeside, kLinedUp, kLinedMany, kPairs5, kPairs6, kHalves5, kHalves6 };
static float* g_pair_parts;
static uint16_t* g_lined;
CUtensorMap heads_map(const void* w, int64_t rows, int64_t hidden, int cut) {
  CUtensorMap m;
  cuuint64_t dims[4] = {(cuuint64_t)hidden, (cuuint64_t)cut, 2, (cuuint64_t)rows / (2 * cut)},
             strides[3] = {(cuuint64_t)hidden * 2, (cuuint64_t)hidden * 2 * cut, (cuuint64_t)hidden * 4 * cut};
  cuuint32_t box[4] = {64, (cuuint32_t)cut, 1, 64u / cut}, es[4] = {1, 1, 1, 1};
  CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)w, dims, strides, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) {
    printf("encode heads %d\n", r);
    exit(1);
  }
  return m;
}
/// The rows that stand, one behind another; what comes behind it overlaps.
template <class Shape>
void launch_line_up(Problem& p, Shape& s, bool copies, bool many = false, int blocks = 132) {
  s.list = g_list, s.list_count = (int*)(g_list + kListRows);
  const auto line = many ? line_up_many : p.rows.tokens > kLinedRows ? line_up<kLinedMore> : line_up<kLinedRows>;
  launch_over(line, blocks, many ? kLineManyThreads : kLineThreads, 0, 1, p.rows, (const uint4*)p.ctx, p.ctx_stride / 8,
              copies ? p.hidden / 8 : 0, g_list, (int*)(g_list + kListRows), (uint4*)g_lined);
  if (copies) p.ctx = g_lined, p.ctx_stride = p.hidden;
}
template <int D>
void launch_bulk(const CUtensorMap& wide, const CUtensorMap& m, const Problem& all, int sms = 132, Planned planned = kBeside) {
  auto k = bulk_rows<core::bfloat16, D>;
  using B = Bulk<D>;
  static unsigned long long number = 0x1234567812345678ull;
  const bool lined = planned != kBeside || all.rows.commit.data, pdl = g_bulk_pdl;
  const int T = all.rows.tokens, round = lined ? g_round : kListRows;
  for (int first = 0; first < T; first += round) {
    Problem p = all;
    p.rows.first = first;
    p.rows.tokens = std::min(T - first, round);
    BulkShape s{B::places(p.layers, p.heads), Runs::of(p.hidden), nullptr, nullptr, g_parts, g_flags, number += 0x9E3779B97F4A7C15ull};
    if (lined) g_bulk_pdl = true, launch_line_up(p, s, true, p.rows.tokens > kLinedMore || planned == kLinedMany, sms);
    launch_over(k, sms, B::kThreads, B::kShared, 2, wide, m, rows_map(p.ctx, lined ? p.rows.tokens : T, p.hidden, p.ctx_stride, 128), p, s);
    g_bulk_pdl = pdl;
  }
}
template <int kQuarters>
void launch_pairs(const CUtensorMap& wide, const CUtensorMap& narrow, Problem p, bool lined, int clusters = 66) {
  using F = Pair<kQuarters>;
  PairShape s{LayerPlaces(p.layers, p.heads, kQuarters), Runs::of(p.hidden), g_pair_parts, std::min(p.rows.tokens, 128), nullptr, nullptr};
  const bool pdl = g_bulk_pdl;
  if (lined) launch_line_up(p, s, true), g_bulk_pdl = true;
  const int64_t tokens = lined ? p.rows.tokens : p.rows.first + p.rows.tokens;
  launch_over(pair_rows<core::bfloat16, kQuarters>, 2 * std::min(clusters, s.deal.used), F::kThreads, F::kShared, 2, wide, narrow,
              rows_map(p.ctx, tokens, p.hidden, p.ctx_stride, s.box), p, s);
  g_bulk_pdl = pdl;
}
template <int kQuarters>
void launch_halves(const void* w, int64_t weight_rows, Problem p, bool lined, int clusters = 66) {
  using F = Halves<kQuarters>;
  HalvesShape s{LayerPlaces(p.layers, p.heads, kQuarters), Runs::of(p.hidden), nullptr, nullptr, !lined,
                half_cut(p.is_neox_style, p.rotary_dim)};
  const bool pdl = g_bulk_pdl;
  const int64_t tokens = lined ? p.rows.tokens : p.rows.first + p.rows.tokens;
  launch_line_up(p, s, lined), g_bulk_pdl = true;
  launch_over(half_rows<core::bfloat16, kQuarters>, 2 * std::min(clusters, s.deal.used), F::kThreads, F::kShared, 2,
              heads_map(w, weight_rows, p.hidden, s.cut), rows_map(w, weight_rows, p.hidden, p.hidden, F::kNarrow),
              rows_map(w, weight_rows, p.hidden, p.hidden, F::kHalf), rows_map(p.ctx, tokens, p.hidden, p.ctx_stride, 64),
              rows_map(p.ctx, tokens, p.hidden, p.ctx_stride, 128), p, s);
  g_bulk_pdl = pdl;
}
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  bool quick = argc > 1, timing = quick && !strcmp(argv[1], "time"), tiny = quick && !strncmp(argv[1], "tiny", 4);
  // "pairs", "tinypairs": only what is about pair_rows, beside one form of bulk_rows
  const bool only_pairs = quick && strstr(argv[1], "pairs");
  SPECSTATE_CK(cudaMalloc(&g_list, kListRows * 16 + 64));
  SPECSTATE_CK(cudaStreamCreate(&st));
  SPECSTATE_CK(cudaMalloc(&g_parts, kPartBlocks * kPartBytes));
  SPECSTATE_CK(cudaMalloc(&g_pair_parts, pair_bytes(8)));
  SPECSTATE_CK(cudaMemset(g_pair_parts, 0xFF, pair_bytes(8)));
  SPECSTATE_CK(cudaMalloc(&g_lined, kListRows * 8192 * 2));
  SPECSTATE_CK(cudaMemset(g_lined, 0xFF, kListRows * 8192 * 2));
  SPECSTATE_CK(cudaMalloc(&g_flush, kFlush));
  SPECSTATE_CK(cudaMalloc(&g_flags, kPartBlocks * kPartFlags * 8));
  SPECSTATE_CK(cudaMemset(g_flags, 0x77, kPartBlocks * kPartFlags * 8));
  cudaDriverEntryPointQueryResult q;
  void* f;
  SPECSTATE_CK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &q));
  encode = (Encode)f;
  unsigned long long* stat = dev<unsigned long long>(16);
  int* flag = dev<int>(2);
  SPECSTATE_CK(cudaMemset(flag, 0, 8));
  auto check = [&](const char* name, int H, int L, int N, int D, int R, int T, int W, bool neox, bool ran, bool usebias, int many_only) {
    static int number = 0;  // `tiny PART PARTS`: one of several processes
    if (argc > 3 && number++ % atoi(argv[3]) != atoi(argv[2])) return;
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
      for (int i = 0; i < T / W; i++) hc[i] = many_only == 2 ? W / 2 : rand() % (W + 1);
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
    ref_product<<<dim3(rows / 8, std::min((T + 7) / 8, 16)), 256, 0, st>>>(x, w, usebias ? bias : nullptr, proj, T, rows, H, 0, 0);
    int64_t pool = (int64_t)L * slots * N * D;
    uint16_t *kp[16], *vp[16];
    for (int i = 0; i < 16; i++) {
      kp[i] = dev<uint16_t>(pool);
      vp[i] = dev<uint16_t>(pool);
      SPECSTATE_CK(cudaMemset(kp[i], 0x5A, pool * 2));
      SPECSTATE_CK(cudaMemset(vp[i], 0x5A, pool * 2));
    }
    CUtensorMap quarters = make_map(w, rows, H, 1), wide = make_map(w, rows, H, 4), halves = make_map(w, rows, H, 2);
    int first_ran = -1;
    struct Form {
      const char* name;
      Planned planned;
      int sms, round = kListRows;
    };
    static const Form forms[] = {{"beside", kBeside, 132},
                                 {"lined up", kLinedUp, 132},
                                 {"rounds of 1032", kLinedUp, 132, 1032},
                                 {"rounds of 20", kLinedMany, 76, 20},
                                 {"6 blocks", kBeside, 6},
                                 {"6 blocks, lined", kLinedUp, 6},
                                 {"98 blocks", kBeside, 98},
                                 {"pairs of 160", kPairs5, 66},
                                 {"pairs of 192", kPairs6, 66},
                                 {"5 pairs, 160", kPairs5, 5},
                                 {"3 pairs, 192", kPairs6, 3},
                                 {"halves of 160", kHalves5, 66},
                                 {"halves of 192", kHalves6, 66},
                                 {"5 halves, 160", kHalves5, 5},
                                 {"3 halves, 192", kHalves6, 3}};
    int v = -1;
    for (const Form& form : forms) {
      ++v;
#ifdef SPECSTATE_NO_64
      if (D == 64) continue;
#endif
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
      const bool pairs = form.planned >= kPairs5, halves_form = form.planned >= kHalves5;
      const bool lined = pairs && (W || v % 2 == 0);
      if (pairs && (D != 128 || ((lined || halves_form) && T > kLinedRows))) continue;
      if (only_pairs && !pairs && v > 0) continue;
      g_round = form.round;
      if (form.planned == kPairs5)
        launch_pairs<5>(wide, quarters, p, lined, form.sms);
      else if (form.planned == kPairs6)
        launch_pairs<6>(wide, halves, p, lined, form.sms);
      else if (form.planned == kHalves5)
        launch_halves<5>(w, rows, p, lined, form.sms);
      else if (form.planned == kHalves6)
        launch_halves<6>(w, rows, p, lined, form.sms);
      else if (D == 128)
        launch_bulk<128>(wide, quarters, p, form.sms, form.planned);
#ifndef SPECSTATE_NO_64
      else
        launch_bulk<64>(wide, quarters, p, form.sms, form.planned);
#endif
      cudaError_t e = cudaStreamSynchronize(st);
      if (e) {
        printf("%s form %d: %s\n", name, v, cudaGetErrorString(e));
        exit(1);
      }
      SPECSTATE_CK(cudaMemsetAsync(stat, 0, 128, st));
      compare<<<((int64_t)T * G + 127) / 128, 128, 0, st>>>(proj, norm, eps, table, pos, slot, written, (__nv_bfloat16*)kp[v],
                                                            (__nv_bfloat16*)vp[v], T, L, N, D, R, neox, ran, slots, stat);
      stray<<<512, 256, 0, st>>>(kp[v], pool, slots, N * D, dn, stat + 6);
      stray<<<512, 256, 0, st>>>(vp[v], pool, slots, N * D, dn, stat + 6);
      if (first_ran < 0) first_ran = v;
      differ<<<512, 256, 0, st>>>(kp[v], kp[first_ran], pool, stat + 7);
      differ<<<512, 256, 0, st>>>(vp[v], vp[first_ran], pool, stat + 7);
      unsigned long long s[16];
      SPECSTATE_CK(cudaMemcpyAsync(s, stat, 128, cudaMemcpyDeviceToHost, st));
      SPECSTATE_CK(cudaStreamSynchronize(st));
      failed |= s[6] || s[7] || 100.0 * s[1] > 0.1 * std::max(s[0], 20000ull);
      printf(
          "%-16s %-14s rows %4d/%4d: V %llu off %.4f%% bad %llu | K off %.3f%% bad %llu | stray %llu | differs from the first form %llu\n",
          name, form.name, cnt, T, s[0], 100.0 * s[1] / std::max(1ull, s[0]), s[2], 100.0 * s[4] / std::max(1ull, s[3]), s[5], s[6], s[7]);
    }
    for (void* p : {(void*)w, (void*)x, (void*)norm, (void*)bias, (void*)eps, (void*)table, (void*)pos, (void*)slot, (void*)written,
                    (void*)commit, (void*)dn, (void*)proj})
      cudaFree(p);
    for (int i = 0; i < 16; i++) {
      cudaFree(kp[i]);
      cudaFree(vp[i]);
    }
  };
  bool trace_run = quick && !strcmp(argv[1], "trace"), cold_run = quick && !strcmp(argv[1], "cold");
  if (trace_run || cold_run) timing = true;
  if (timing) SPECSTATE_CK(cudaMemset(g_flush, 0, kFlush));
  if (!timing) {
    if (!only_pairs) {
      check("interleaved", 1024, 2, 8, 128, 128, 64, 0, false, false, true, 0);
      check("interleaved 64", 1024, 2, 8, 128, 64, 64, 0, false, false, true, 0);
      check("R32", 1024, 2, 2, 128, 32, 50, 0, true, false, false, 0);
      check("D64 N1 R32", 1024, 3, 1, 64, 32, 133, 0, true, false, true, 0);
      check("D64 N3 R64", 576, 3, 3, 64, 64, 64, 8, true, false, false, 0);
      check("D64 inter", 640, 3, 2, 64, 32, 64, 8, false, true, false, 0);
      check("D64 R16", 640, 3, 2, 64, 16, 164, 8, true, true, false, 0);
      check("dense inter", 512, 3, 1, 128, 128, 130, 0, false, true, true, 2);
    }
    check("tiny pairs 9", 576, 1, 2, 128, 64, 100, 0, true, false, true, 0);
    check("tiny pairs 4..", 512, 1, 1, 128, 128, 280, 8, true, true, true, 1);
    if (!tiny) {
      for (int T : {1, 65, 96, 127, 128, 129, 192, 255, 256}) check("pairs", 4096, 5, 8, 128, 128, T, 0, true, false, T % 2, 0);
      check("K3 step", 7168, 6, 8, 128, 128, 256, 8, true, false, false, 2);
      check("K3 step 64", 7168, 6, 8, 128, 128, 512, 8, true, false, true, 2);
      check("K3 128", 7168, 6, 8, 128, 128, 128, 8, true, false, false, 0);
      check("K3 700", 7168, 6, 8, 128, 128, 700, 20, true, false, false, 0);
      if (only_pairs) {
        printf("%s\n", failed ? "FAILED" : "all forms right");
        return failed;
      }
      check("8B 200", 4096, 5, 8, 128, 128, 200, 0, true, false, true, 0);
      check("4B partial", 2560, 5, 8, 128, 64, 237, 0, true, false, false, 0);
      check("many 8B", 4096, 5, 8, 128, 128, 300, 0, true, false, false, 1);
      check("8B w16", 4096, 5, 8, 128, 128, 512, 16, true, false, true, 1);
      check("1024", 4096, 5, 8, 128, 128, 1024, 0, true, false, false, 1);
      check("dense", 4096, 5, 8, 128, 128, 500, 0, true, false, false, 2);
      check("dense 9 heads", 2560, 1, 9, 128, 128, 700, 0, true, false, true, 2);
      check("dense D64", 1024, 1, 3, 64, 64, 260, 0, true, true, true, 2);
      check("K3", 7168, 6, 8, 128, 128, 264, 16, true, false, false, 0);
      check("threes", 512, 5, 5, 128, 128, 256, 0, true, false, false, 1);  // 40 tiles of 66 pairs of blocks
      check("threes, 8 runs", 4160, 5, 5, 128, 128, 250, 0, true, false, true, 1);
      check("many 8200", 512, 1, 2, 128, 128, 8200, 8, true, false, false, 1);
      check("many 2100", 4096, 1, 8, 128, 128, 2100, 0, true, false, false, 1);
    }
    if (!tiny) check("again", 4096, 5, 8, 128, 128, 384, 0, true, false, false, 2);
    if (!only_pairs) check("tiny many", 512, 1, 1, 128, 128, 200, 8, true, false, true, 1);
  }
  printf("%s\n", failed ? "FAILED" : "all forms right");
  if (!timing) return failed;
  // times
  int N = 8, D = 128, R = 128;
  Lt lt;
  lt.init();
  for (int H : {7168, 4096, 2560}) {
    if (cold_run && argc > 3 && H != atoi(argv[2])) continue;
    const int L = H == 7168 ? 6 : 5, G = L * 2 * N;
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
    auto* commit = dev<int>(TM);
    std::vector<int> sevens(TM, 7);
    SPECSTATE_CK(cudaMemcpy(commit, sevens.data(), TM * 4, cudaMemcpyHostToDevice));
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
    std::vector<CUtensorMap> quarters, wide, halves;
    for (auto p : w)
      quarters.push_back(make_map(p, rows, H, 1)), wide.push_back(make_map(p, rows, H, 4)), halves.push_back(make_map(p, rows, H, 2));
    printf("H %d: weights %.1f MB; %.2f us at 4.3 TB/s\n", H, rows * H * 2e-6, rows * H * 2 / 4.3e6);
#ifdef SPECSTATE_BULK_TRACE
    if (H != 7168)
      for (int T : {256, 1024, 4096})
        for (int ga : {0, 1}) {
          void* at;
          SPECSTATE_CK(cudaGetSymbolAddress(&at, bulk_trace_of));
          int n = T > 1024 ? 40 : 100;
          for (int i = 0; i < n; i++) {
            if (i == n - 1) SPECSTATE_CK(cudaMemsetAsync(at, 0, sizeof(bulk_trace_of), st));
            if (i == n - 1 && argc > 2) read_all<<<264, 512, 0, st>>>(g_flush, kFlush / 16, nullptr);
            launch_bulk<128>(wide[i % 3], quarters[i % 3], problem(T, i), 132, ga ? kLinedUp : kBeside);
          }
          SPECSTATE_CK(cudaStreamSynchronize(st));
          static unsigned long long h[132][16][8];
          SPECSTATE_CK(cudaMemcpyFromSymbol(h, bulk_trace_of, sizeof h));
          double ghz = 0;
          for (int t = 1; t < 16; t++)
            if (h[0][t][7] && h[0][t - 1][7]) ghz = double(h[0][t][6] - h[0][t - 1][6]) / (h[0][t][7] - h[0][t - 1][7]);
          printf(
              "H %d T %d %s%s: %.2f GHz; per tile, cycles (medians over blocks): begin->first stage, ->summed, ->left, ->next; beside: "
              "start after left, duration\n",
              H, T, "", ga == 0 ? "" : " lined up", ghz);
          if (T <= 1024) {
            std::vector<long long> v[4];
            for (int b = 0; b < 132; b++)
              if (h[b][15][3])
                for (int e = 0; e < 4; e++) v[e].push_back(e < 3 ? h[b][15][e + 1] - h[b][15][e] : h[b][0][0] - h[b][15][3]);
            printf("  before (entry->waited->listed->begin):");
            for (auto& u : v) std::sort(u.begin(), u.end()), printf(" %lld/%lld", u[u.size() / 2], u.back());
            printf("\n");
          }
          {
            std::vector<long long> v[4];
            for (int b = 0; b < 132; b++)
              if (h[b][13][1])
                for (int e = 0; e < 4; e++)
                  if (h[b][13][3]) v[e].push_back(e < 3 ? h[b][13][e + 1] - h[b][13][e] : 0);
            printf("  last tile with a head: 8 rows, 8 rows, V:");
            for (auto& u : v)
              if (!u.empty()) std::sort(u.begin(), u.end()), printf(" %lld/%lld", u[u.size() / 2], u.back());
            printf("\n");
          }
          {
            std::vector<long long> v[9];
            for (int b = 0; b < 132; b++)
              if (h[b][14][5]) {
                for (int e = 0; e < 7; e++) v[e].push_back(h[b][14][e] - h[b][15][0]);
                v[7].push_back(h[b][15][4] - h[b][15][0]), v[8].push_back(h[b][15][5] - h[b][15][0]);
              }
            printf("  stages there, since entry; warp 0: barriers, asked:");
            for (auto& u : v)
              if (!u.empty()) std::sort(u.begin(), u.end()), printf(" %lld/%lld", u[u.size() / 2], u.back());
            printf("\n");
          }
          for (int t = 0; t < (T > 1024 ? 7 : 14); t++) {
            std::vector<long long> v[6];
            for (int b = 0; b < 132; b++)
              if (h[b][t][6]) {
                auto* x = h[b][t];
                v[0].push_back(x[1] - x[0]);
                v[1].push_back(x[2] - x[1]);
                v[2].push_back(x[3] - x[2]);
                v[3].push_back(x[6] - x[3]);
                if (x[5]) {
                  v[4].push_back(x[4] - x[3]);
                  v[5].push_back(x[5] - x[3]);
                }
              }
            if (v[0].empty()) {
              if (t > 0) break;
              continue;
            }
            printf("  tile %2d (%3zu):", t, v[0].size());
            for (auto& u : v) {
              if (u.empty()) continue;
              std::sort(u.begin(), u.end());
              printf(" %lld/%lld", u[u.size() / 2], u.back());
            }
            printf("\n");
          }
        }
#endif
    if (trace_run) continue;
    if (cold_run) {
      // In turns: the card is limited by its power, so only neighbours in time compare. "cold HIDDEN TOKENS": one cell.
      for (int T : {144, 256, 512, 1024, 4096, 8192, 16384}) {
        if (argc > 3    ? H != atoi(argv[2]) || T != atoi(argv[3])
            : H == 7168 ? T != 1024
                        : H != 4096 && T != 256 && T != 1024 && T != 4096 && T != 16384)
          continue;
        const int reps = T > 8192 ? 2 : T > 1024 ? 3 : 8, turns = argc > 3 ? 3 : 2;
        printf("cold H %d T %d:", H, T);
        g_bulk_pdl = T <= 1024;
        auto pl = lt.plan(T, rows, H);
        for (int turn = 0; turn < turns; ++turn) {
          printf(" | cublasLt");
          for (int j = 0; j < std::min(pl.n, 2); j++)
            printf(" %.2f", time_cold([&](int i) { lt.run(pl, j, w[i % 3], x + (i % 2) * (int64_t)TM * H, y); }, reps, 5));
          for (const bool windows : {false, true})
            printf(" %s %.2f", windows ? "[b, W]" : "ours",
                   time_cold(
                       [&](int i) {
                         Problem p = problem(T, i);
                         if (windows) p.rows.slots.windows = true, p.rows.slots.outer = T;
                         launch_bulk<128>(wide[i % 3], quarters[i % 3], p, 132, kBeside);
                       },
                       reps, 5));
        }
        if (T != 8192)
          printf(" | 7 of 16 of them %.2f", time_cold(
                                                [&](int i) {
                                                  Problem p = problem(T, i);
                                                  p.rows.commit = {commit, false, false, 0, 1}, p.rows.width = 16;
                                                  launch_bulk<128>(wide[i % 3], quarters[i % 3], p, 132, kLinedUp);
                                                },
                                                reps));
        g_bulk_pdl = false;
        printf("\n");
      }
      continue;
    }
    if (argc > 2 && !strcmp(argv[2], "pairs")) {
      struct Cell {
        int tokens, width, stand;
      };
      const std::vector<Cell> k3 = {{256, 8, 4}, {512, 8, 4}, {256, 0, 0}, {512, 16, 7}, {512, 8, 6}},
                              others = {{128, 0, 0}, {256, 0, 0}, {256, 8, 4}, {512, 16, 7}, {512, 8, 4}};
      for (const Cell& c : H == 7168 ? k3 : others) {
        std::vector<int> lens(TM, c.stand);
        SPECSTATE_CK(cudaMemcpy(commit, lens.data(), TM * 4, cudaMemcpyHostToDevice));
        const auto call = [&](int form, int i) {
          Problem p = problem(c.tokens, i);
          if (c.width) p.rows.commit = {commit, false, false, 0, 1}, p.rows.width = c.width;
          if (form == 0) launch_bulk<128>(wide[i % 3], quarters[i % 3], p, 132, c.width ? kLinedUp : kBeside);
          if (form == 1) launch_pairs<5>(wide[i % 3], quarters[i % 3], p, c.width > 0);
          if (form == 2) launch_pairs<6>(wide[i % 3], halves[i % 3], p, c.width > 0);
          if (form == 3) launch_halves<5>(w[i % 3], rows, p, c.width > 0);
          if (form == 4) launch_halves<6>(w[i % 3], rows, p, c.width > 0);
        };
#ifdef SPECSTATE_DRAFT_KV_TRACE
        for (int form = 1; form < 5;
             ++form) {  // when blocks pass each point, ns behind the first one's entry: medians over blocks and the last
          static unsigned long long at[132][kTracePoints];
          memset(at, 0, sizeof at);
          SPECSTATE_CK(cudaMemcpyToSymbol(trace_of, at, sizeof at));
          for (int i = 0; i < 3; i++) {
            read_all<<<264, 512, 0, st>>>(g_flush, kFlush / 16, nullptr);
            call(form, i);
          }
          SPECSTATE_CK(cudaStreamSynchronize(st));
          SPECSTATE_CK(cudaMemcpyFromSymbol(at, trace_of, sizeof at));
          unsigned long long first = ~0ull;
          for (auto& block : at)
            if (block[kEntry]) first = std::min(first, block[kEntry]);
          printf("trace: H %d T %d, %d of %d, %s:", H, c.tokens, c.stand, c.width,
                 form == 1   ? "pairs of 160"
                 : form == 2 ? "pairs of 192"
                 : form == 3 ? "halves of 160"
                             : "halves of 192");
          static const char* const names[] = {"entry",      "listed", "prefetched", "first asked", "all asked", "first stage",
                                              "last stage", "summed", "plan there", "left",        "finished"};
          for (int point = 0; point < kTracePoints; ++point)
            for (int odd = 0; odd < 2; ++odd) {
              std::vector<long long> v;
              for (int b = odd; b < 132; b += 2)
                if (at[b][point]) v.push_back(static_cast<long long>(at[b][point] - first));
              std::sort(v.begin(), v.end());
              if (!v.empty()) printf(" %s%s %lld/%lld", odd ? "" : names[point], odd ? " |" : "", v[v.size() / 2], v.back());
            }
          printf("\n");
        }
        continue;
#endif
        printf("pairs: H %d T %d, %d of %d:", H, c.tokens, c.stand, c.width);
        for (bool pdl : {false, true}) {
          g_bulk_pdl = pdl;
          for (int form : {0, H == 7168 ? 2 : 1, H == 7168 ? 4 : 3})
            printf(" %s%s %.2f (cold %.2f)",
                   form == 0  ? "bulk"
                   : form < 3 ? "pairs"
                              : "halves",
                   pdl ? ", overlap" : "",
                   time_graph(
                       9, [&](int i) { call(form, i); }, 9),
                   time_cold([&](int i) { call(form, i); }, 9, 5));
        }
        g_bulk_pdl = false;
        const int stand = c.width ? c.tokens / c.width * c.stand : c.tokens;
        double best = 1e9, cold = 1e9;
        if (lt.ok) {
          auto pl = lt.plan(stand, rows, H);
          for (int j = 0; j < std::min(pl.n, 3); j++) {
            const auto run = [&](int i) { lt.run(pl, j, w[i % 3], x + (i % 2) * (int64_t)TM * H, y); };
            best = std::min(best, time_graph(9, run, 9)), cold = std::min(cold, time_cold(run, 9, 5));
          }
        }
        printf(" | cublasLt %.2f (cold %.2f)\n", best, cold);
      }
      continue;
    }
    for (int T : {144, 224, 256, 384, 448, 512, 640, 768, 1024, 1792, 2048, 4096, 8192, 16384}) {
      if (H == 7168 || (H != 4096 && T != 256 && T != 448 && T != 1024)) continue;
      int n = T > 4096 ? 2 : T > 1024 ? 3 : 9, samples = T > 4096 ? 3 : T > 1024 ? 3 : 9;
      printf("T %d:", T);
      const auto report = [&](const char* name, Planned planned, bool windows) {
        printf(" %s %.2f", name,
               time_graph(
                   n,
                   [&](int i) {
                     Problem p = problem(windows ? T * 16 / 7 : T, i);
                     if (windows) p.rows.commit = {commit, false, false, 0, 1}, p.rows.width = 16;
                     launch_bulk<128>(wide[i % 3], quarters[i % 3], p, 132, planned);
                   },
                   samples));
      };
      printf(" lining up alone %.2f",
             time_graph(
                 9,
                 [&](int i) {
                   Problem p = problem(std::min(T, kListRows), i);
                   BulkShape s{Bulk<128>::places(p.layers, p.heads), Runs::of(p.hidden), nullptr, nullptr, nullptr, nullptr, 1};
                   launch_line_up(p, s, true, p.rows.tokens > kLinedMore);
                 },
                 11));
      report("beside", kBeside, false);
      report("lined up", kLinedUp, false);
      if (T <= 1024) {
        g_bulk_pdl = true;
        report("beside, overlap", kBeside, false);
        report("lined up, overlap", kLinedUp, false);
        g_bulk_pdl = false;
      }
      if (T == 224 || T == 448 || T == 1792) report("7 of 16", kLinedUp, true);
      double best = 1e9;
      if (lt.ok) {
        auto pl = lt.plan(T, rows, H);
        for (int j = 0; j < std::min(pl.n, T > 2048 ? 2 : 4); j++)
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
