#pragma once
// What crosses from check.cpp to a backend: raw pointers, 64-bit strides in elements, sizes.
#include <cstdint>

#include "specstate/stream.hpp"
#include "specstate/tensor.hpp"

namespace specstate::accept {

struct VerifyGreedyArgs {
  const void* candidates;     // [batch, width] int32 or int64
  const void* target_argmax;  // [batch, width] same dtype
  TensorView verify_lens;     // [batch] int32 or int64, or not given
  std::int32_t* accept_lens;  // [batch]
  void* out_tokens;           // [batch, width] same dtype
  std::int64_t candidates_stride[2], target_stride[2], accept_stride, out_stride[2];
  std::int64_t batch, width;
  bool is_int64;
};

struct VerifyRejectionArgs {
  TensorView candidates;    // [batch, width] int32 or int64
  TensorView draft_probs;   // [batch, width - 1, vocab], or not given
  TensorView target_probs;  // [batch, width, vocab]
  TensorView uniforms;      // [batch, width]
  TensorView verify_lens;   // [batch], or not given
  TensorView accept_lens;   // [batch] int32
  TensorView out_tokens;    // [batch, width] dtype of candidates
  std::int64_t batch, width, vocab;
};

struct PlanVerifyLengthsArgs {
  TensorView confidences, lagged;  // [batch, proposals]
  TensorView probe_tokens, speed;  // [probes], or neither given
  TensorView max_lens;             // [batch], or not given
  TensorView verify_lens;          // [batch] int32
  std::int64_t batch, proposals, probes;
};

namespace cpu {
void run(const VerifyGreedyArgs& args, Stream stream);
void run(const VerifyRejectionArgs& args, Stream stream);
void run(const PlanVerifyLengthsArgs& args, Stream stream);
}  // namespace cpu

namespace cuda {
void run(const VerifyGreedyArgs& args, Stream stream);
void run(const VerifyRejectionArgs& args, Stream stream);
void run(const PlanVerifyLengthsArgs& args, Stream stream);
}  // namespace cuda

}  // namespace specstate::accept
