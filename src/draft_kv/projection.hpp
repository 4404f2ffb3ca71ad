#pragma once
// The packed K and V projection of all layers.
#include <vector>

#include "cpu/matmul.hpp"
#include "specstate/draft_kv.hpp"

namespace specstate::draft_kv {

struct KvProjection::Packed {
  std::int64_t layers, columns, hidden;  // columns of one layer
  DType dtype;                           // of the weights that were packed
  specstate::cpu::PackedMatrix weight;   // [layers * columns, hidden]
  std::vector<float> bias;               // [layers * columns], or empty
};

}  // namespace specstate::draft_kv
