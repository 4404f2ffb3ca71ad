#include <cstdint>
#include <cstdio>
#include <specstate/accept.hpp>
#include <specstate/error.hpp>
#include <specstate/version.hpp>

int main() {
  using namespace specstate;
  std::int32_t candidates[] = {5, 1, 2, 3}, target[] = {1, 2, 9, 9}, accept_len = 0, out[4] = {};
  accept::VerifyGreedyParams p;
  p.candidates = {candidates, DType::kInt32, {1, 4}};
  p.target_argmax = {target, DType::kInt32, {1, 4}};
  p.accept_lens = {&accept_len, DType::kInt32, {1}};
  p.out_tokens = {out, DType::kInt32, {1, 4}};
  accept::verify_greedy(p);
  std::printf("specstate %s accepted %d: %d %d %d\n", SPECSTATE_VERSION, accept_len, out[0], out[1], out[2]);
  p.out_tokens = {out, DType::kInt32, {1, 3}};
  try {
    accept::verify_greedy(p);
  } catch (const Error& e) {  // an exception crosses the library's border as itself
    std::printf("%s\n", e.what());
    return 0;
  }
  return 1;
}
