#pragma once
// What crosses from check.cpp to a backend: raw pointers, 64-bit strides in elements, sizes.
#include <cstdint>

#include "specstate/stream.hpp"

namespace specstate::accept {

struct VerifyGreedyArgs {
  const void* candidates;     // [batch, width] int32 or int64
  const void* target_argmax;  // [batch, width] same dtype
  std::int32_t* accept_lens;  // [batch]
  void* out_tokens;           // [batch, width] same dtype
  std::int64_t candidates_stride[2], target_stride[2], accept_stride, out_stride[2];
  std::int64_t batch, width;
  bool is_int64;
};

namespace cpu {
void run(const VerifyGreedyArgs& args, Stream stream);
}

}  // namespace specstate::accept
