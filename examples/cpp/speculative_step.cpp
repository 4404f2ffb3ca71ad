// One speculative step of a KDA layer: four proposed tokens are verified, the target accepts some of them, and the recurrent state
// advances over exactly those, bit for bit as if they had been decoded one after the other.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <specstate/accept.hpp>
#include <specstate/kda.hpp>
#include <specstate/supports.hpp>
#include <string>
#include <vector>

using namespace specstate;

constexpr std::int64_t kTokens = 4, kHeads = 1, kDim = 64;

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto numbers = [&](std::int64_t n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = normal(random);
    return x;
  };
  const std::int64_t row = kHeads * kDim;
  std::vector<float> q = numbers(kTokens * row), k = numbers(kTokens * row), v = numbers(kTokens * row), g = numbers(kTokens * row);
  std::vector<float> beta = numbers(kTokens * kHeads), a_log = numbers(kHeads), bias = numbers(row), out(q.size());
  std::vector<float> state = numbers(kHeads * kDim * kDim), plain = state;
  std::vector<float> rawv(v.size()), rawk(k.size()), decay(g.size()), gate(beta.size());
  std::int32_t slot = 0, ends[] = {0, kTokens};

  // Verify all proposals. The state is not touched; the rings record what its update would need.
  kda::VerifyParams verify;
  verify.x_q = {q.data(), DType::kFloat32, {kTokens, kHeads, kDim}};
  verify.x_k = {k.data(), DType::kFloat32, {kTokens, kHeads, kDim}};
  verify.x_v = {v.data(), DType::kFloat32, {kTokens, kHeads, kDim}};
  verify.g = {g.data(), DType::kFloat32, {kTokens, kHeads, kDim}};
  verify.beta = {beta.data(), DType::kFloat32, {kTokens, kHeads}};
  verify.A_log = {a_log.data(), DType::kFloat32, {kHeads}};
  verify.dt_bias = {bias.data(), DType::kFloat32, {row}};
  verify.state = {state.data(), DType::kFloat32, {1, kHeads, kDim, kDim}};
  verify.slots = {&slot, DType::kInt32, {1}};
  verify.cu_seqlens = {ends, DType::kInt32, {2}};
  verify.out = {out.data(), DType::kFloat32, {kTokens, kHeads, kDim}};
  verify.rings = {{rawv.data(), DType::kFloat32, {1, kHeads, kTokens, kDim}},
                  {rawk.data(), DType::kFloat32, {1, kHeads, kTokens, kDim}},
                  {decay.data(), DType::kFloat32, {1, kHeads, kTokens, kDim}},
                  {gate.data(), DType::kFloat32, {1, kHeads, kTokens}}};
  kda::verify(verify);

  // The target's choices accept two proposals and add one token of its own: three tokens to commit.
  std::int32_t candidates[] = {7, 11, 13, 17}, target[] = {11, 13, 19, 23}, accepted = 0, tokens[kTokens];
  accept::VerifyGreedyParams judge;
  judge.candidates = {candidates, DType::kInt32, {1, kTokens}};
  judge.target_argmax = {target, DType::kInt32, {1, kTokens}};
  judge.accept_lens = {&accepted, DType::kInt32, {1}};
  judge.out_tokens = {tokens, DType::kInt32, {1, kTokens}};
  accept::verify_greedy(judge);

  kda::FoldParams fold;
  fold.state = verify.state;
  fold.rings = verify.rings;
  fold.slots = verify.slots;
  fold.accept = {&accepted, DType::kInt32, {1}};
  kda::fold(fold);

  // The same tokens decoded in place from the same start.
  kda::DecodeParams decode;
  static_cast<kda::StepParams&>(decode) = verify;
  ends[1] = accepted;
  decode.state.data = plain.data();
  kda::decode(decode);
  std::printf("accepted %d tokens: %d %d %d; states are %s\n", accepted, tokens[0], tokens[1], tokens[2],
              state == plain ? "equal bit for bit" : "different");

  // Would another call be taken? Nothing runs, nothing is read.
  fold.accept.dtype = DType::kFloat32;
  const std::string why = refusal([&] { kda::fold(fold); });
  std::printf("would fold take float32 counts? %s\n", why.empty() ? "yes" : ("no: " + why).c_str());
  return state == plain ? 0 : 1;
}
