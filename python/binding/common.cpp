#include "common.hpp"

#include "specstate/supports.hpp"
#include "specstate/version.hpp"

namespace specstate::binding {

namespace {

[[noreturn]] void refuse(const char* name, const std::string& text) { throw ArgumentError(std::string(name) + ": " + text); }

DType dtype_of(const char* name, DLDataType t) {
  if (t.lanes == 1) {
    switch (t.code) {
      case kDLFloat:
        if (t.bits == 32) return DType::kFloat32;
        if (t.bits == 16) return DType::kFloat16;
        if (t.bits == 64) return DType::kFloat64;
        break;
      case kDLBfloat:
        if (t.bits == 16) return DType::kBFloat16;
        break;
      case kDLFloat8_e4m3fn: return DType::kFloat8E4M3FN;
      case kDLBool: return DType::kBool;
      case kDLInt:
        if (t.bits == 8) return DType::kInt8;
        if (t.bits == 16) return DType::kInt16;
        if (t.bits == 32) return DType::kInt32;
        if (t.bits == 64) return DType::kInt64;
        break;
      case kDLUInt:
        if (t.bits == 8) return DType::kUInt8;
        if (t.bits == 16) return DType::kUInt16;
        if (t.bits == 32) return DType::kUInt32;
        if (t.bits == 64) return DType::kUInt64;
        break;
      default: break;
    }
  }
  refuse(name, "expected a float, bfloat16, float8_e4m3fn, integer or bool dtype, got DLPack code " + std::to_string(t.code) + ", " +
                   std::to_string(t.bits) + " bits, " + std::to_string(t.lanes) + " lanes.");
}

Device device_of(const char* name, DLDevice d) {
  switch (d.device_type) {
    case kDLCPU: return {DeviceType::kCpu, 0, false};
    case kDLCUDAHost: return {DeviceType::kCpu, 0, true};
    case kDLCUDA: return {DeviceType::kCuda, d.device_id, false};
    default: refuse(name, "expected a CPU or CUDA tensor, got DLPack device type " + std::to_string(static_cast<int>(d.device_type)) + ".");
  }
}

/// The same memory under another dtype of the same size: how ml_dtypes arrays, which NumPy cannot export, come in.
ffi::Tensor reinterpret(ffi::Tensor source, DLDataType dtype) {
  const DLDataType old = source.dtype();
  if (dtype.bits * dtype.lanes != old.bits * old.lanes)
    throw ffi::Error("ValueError", "reinterpret: expected a dtype of the same size.", "");
  struct Holder {
    ffi::Tensor source;
    DLManagedTensorVersioned managed;
  };
  auto* holder = new Holder{std::move(source), {}};
  holder->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  holder->managed.manager_ctx = holder;
  holder->managed.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<Holder*>(self->manager_ctx); };
  holder->managed.flags = 0;
  holder->managed.dl_tensor = *holder->source.GetDLTensorPtr();
  holder->managed.dl_tensor.dtype = dtype;
  return ffi::Tensor::FromDLPackVersioned(&holder->managed);
}

ffi::String version() { return SPECSTATE_VERSION; }

}  // namespace

void view(const char* name, const DLTensor* t, TensorView& v) {
  if (t->ndim > kMaxDims) refuse(name, "expected at most 8 dimensions, got " + std::to_string(t->ndim) + ".");
  v.dtype = dtype_of(name, t->dtype);
  v.device = device_of(name, t->device);
  v.ndim = t->ndim;
  v.data = static_cast<char*>(t->data) + t->byte_offset;
  std::int64_t step = 1;
  for (int i = v.ndim - 1; i >= 0; --i) {
    v.sizes[i] = t->shape[i];
    v.strides[i] = t->strides ? t->strides[i] : step;
    step *= v.sizes[i];
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(reinterpret, reinterpret);
/// look(name, tensor): the refusal of a tensor that no export can take, under this name.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(look, [](const ffi::String& name, In t) { guard([&] { view(name.c_str(), t); }); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_built, [] { return cuda_built(); });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, version);

}  // namespace specstate::binding

/// check(f, arguments...): the checks of the export f on these arguments, and nothing else. CheckOnly lives inside this one call, whose
/// arguments are converted before it: no Python runs meanwhile that could see it, and nothing can leave it on.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_check(void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  namespace ffi = tvm::ffi;
  if (num_args < 1) throw ffi::Error("TypeError", "check: expected a function and its arguments, got none.", "");
  const auto* views = reinterpret_cast<const ffi::AnyView*>(args);
  const auto f = views[0].cast<ffi::Function>();
  const specstate::CheckOnly scope;
  f.CallPacked(views + 1, num_args - 1, reinterpret_cast<ffi::Any*>(result));
  TVM_FFI_SAFE_CALL_END();
}
