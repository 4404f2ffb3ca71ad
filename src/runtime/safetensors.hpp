#pragma once
// Reader and writer of the safetensors format (huggingface.co/docs/safetensors): 8 bytes of little-endian header length, a JSON
// header {name: {dtype, shape, data_offsets: [begin, end]}}, then the data that the offsets point into.
//
// The reader believes nothing: every length is compared with the file before it is used, products of sizes cannot overflow, the
// tensors must tile the data exactly (no overlap, no hole), and memory use is bounded by the header that is really there.
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "runtime/file.hpp"
#include "specstate/tensor.hpp"

namespace specstate::runtime {

struct StoredTensor {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, relative to the data section
};

/// The header and where the data begins.
struct SafetensorsIndex {
  std::map<std::string, StoredTensor> tensors;
  std::uint64_t data_begin = 0;
};

/// Throws Error(kValue) whose text starts with `name`.
SafetensorsIndex parse_safetensors(std::span<const std::byte> file, const std::string& name);

/// A mapped checkpoint file.
class Safetensors {
 public:
  explicit Safetensors(const std::string& path);
  const std::string& path() const { return path_; }
  const std::map<std::string, StoredTensor>& tensors() const { return index_.tensors; }
  const StoredTensor* find(const std::string& tensor) const;
  /// The bytes of a tensor that must be there with this dtype and shape; a size of -1 takes what is stored (at least 1).
  std::span<const std::byte> get(const std::string& tensor, DType dtype, std::span<const std::int64_t> shape) const;

 private:
  std::string path_;
  MappedFile file_;
  SafetensorsIndex index_;
};

struct TensorToStore {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};
void write_safetensors(const std::string& path, std::span<const TensorToStore> tensors);

}  // namespace specstate::runtime
