#include "specstate/tensor.hpp"

#include "specstate/error.hpp"

namespace specstate {

Error::~Error() = default;

std::int64_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat8E4M3FN:
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool: return 1;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16:
    case DType::kUInt16: return 2;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32: return 4;
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kFloat64: return 8;
  }
  return 0;
}

const char* name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    case DType::kFloat8E4M3FN: return "float8_e4m3fn";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt8: return "uint8";
    case DType::kUInt16: return "uint16";
    case DType::kUInt32: return "uint32";
    case DType::kUInt64: return "uint64";
    case DType::kFloat64: return "float64";
    case DType::kBool: return "bool";
  }
  return "unknown";
}

std::string name_of(const Device& device) { return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index); }

TensorView::TensorView(void* data_, DType dtype_, std::initializer_list<std::int64_t> sizes_, Device device_)
    : data(data_), dtype(dtype_), device(device_), ndim(static_cast<std::int32_t>(sizes_.size())) {
  if (sizes_.size() > static_cast<std::size_t>(kMaxDims))
    throw Error(ErrorKind::kValue, "TensorView: expected at most 8 dimensions, got " + std::to_string(sizes_.size()) + ".");
  int i = 0;
  for (std::int64_t s : sizes_) sizes[i++] = s;
  std::uint64_t step = 1;  // which may overflow: a check says so
  for (i = ndim - 1; i >= 0; --i) {
    strides[i] = static_cast<std::int64_t>(step);
    step *= static_cast<std::uint64_t>(sizes[i]);
  }
}

bool TensorView::inner_contiguous(int dims) const noexcept {
  if (numel() == 0) return true;  // no element, no stride (NumPy exports 0 strides then)
  std::int64_t step = 1;
  for (int i = ndim - 1; i >= 0 && i >= ndim - dims; --i) {
    if (sizes[i] != 1 && strides[i] != step) return false;
    step *= sizes[i];
  }
  return true;
}

TensorView TensorView::operator[](std::int64_t i) const noexcept {
  TensorView t = *this;
  t.data = static_cast<char*>(data) + i * strides[0] * size_of(dtype);
  t.ndim = ndim - 1;
  for (int d = 0; d < t.ndim; ++d) {
    t.sizes[d] = sizes[d + 1];
    t.strides[d] = strides[d + 1];
  }
  return t;
}

std::string shape_text(const TensorView& t) {
  std::string text = "(";
  for (int i = 0; i < t.ndim; ++i) {
    if (i) text += ", ";
    text += std::to_string(t.sizes[i]);
  }
  if (t.ndim == 1) text += ",";
  return text + ")";
}

}  // namespace specstate
