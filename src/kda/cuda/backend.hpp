#pragma once
// What the files of this folder know of each other: the compiled forms of the kernels, and which one a call gets.
#include "cuda/launch.hpp"
#include "kda/args.hpp"
#include "specstate/export.hpp"

namespace specstate::kda::cuda {

/// Form of the recurrence, and value rows of the state that a lane holds (a CTA has 16 times as many).
struct Form {
  bool act_bf16, state_bf16;
  int K, rows;
  bool plain;  // see verify.cuh
};

struct VerifyKernel {
  void (*run)(VerifyCall, int block, int parts) = nullptr;
  std::size_t (*bytes)(int block) = nullptr;  // of shared memory
  int threads = 0;
};
using FoldKernel = void (*)(FoldCall, int parts);

VerifyKernel verify_split(const Form& form);  // bfloat16 activations, float32 state, K = 128, plain: the forms that are cut among CTAs
VerifyKernel verify_ring();                   // the same with V = 128 from a frozen state, for ring mode
VerifyKernel verify_plain(const Form& form);  // the other plain ones, of bfloat16 activations; null where there is none
VerifyKernel verify_bf16(const Form& form);   // any strides, trees
VerifyKernel verify_float(const Form& form);
VerifyKernel verify_tree(const Form& form);  // trees from a frozen state: a CTA a head; float32 states
FoldKernel fold_form(const Form& form);
FoldKernel fold_stream(const Form& form);  // K = V = 128, bfloat16 rings
std::size_t fold_stream_bytes(bool state_bf16);

/// No request: out is zeros.
void clear(const VerifyCall& a, Stream stream);
/// Pools that differ in nothing but where they and their windows are.
struct RollbackPools {
  static constexpr int kMost = 96;  // of a launch; parameters are cold at every launch, so few bytes a pool
  RollbackCall each;
  struct {
    void* pool;
    void* windows;
  } at[kMost];
  int count;
};
void rollback(const RollbackPools& a, Stream stream);
void advance_windows(const VerifyCall& a, Stream stream);
/// After a fold by pending counts: those that it has folded become 0.
void settle_pending(const FoldCall& a, Stream stream);

/// For tests and benchmarks: what the choice would be overridden with.
struct Forced {
  int rows = 0;     // of a lane; 0: free
  int frozen = -1;  // -1: free
  bool overlap = true;
};
SPECSTATE_API Forced& forced();

}  // namespace specstate::kda::cuda
