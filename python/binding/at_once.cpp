// What a call of some twenty tensors costs before its work.
//
// tvm-ffi takes an owner of each tensor: two allocations and two reference counts, half of what such a call costs. A call only looks, and
// the tuple of its arguments keeps them alive meanwhile. So the tuple's address crosses, and each tensor is read where it lies by the function
// that its framework offers for it (DLPack's exchange API, `dltensor_from_py_object_no_sync`). The exports behind it are the same ones.
//
// Whatever is not plain here (another type, a number of more than 64 bits, what the export cannot take) is an answer of false, before
// anything has happened: Python then goes the long way, which converts or says what is wrong.
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

#include "common.hpp"

extern "C" {  // as in common.hpp
long PyTuple_Size(void* tuple);
void* PyTuple_GetItem(void* tuple, long i);
void* PyObject_Type(void* x);
long PyObject_Size(void* x);
void Py_DecRef(void* x);
long long PyLong_AsLongLongAndOverflow(void* x, int* overflow);
double PyFloat_AsDouble(void* x);
const char* PyUnicode_AsUTF8AndSize(void* x, long* size);
void* PyCapsule_GetPointer(void* capsule, const char* name);
void* PyObject_CallFunctionObjArgs(void* f, ...);
void PyErr_Clear();
extern char PyLong_Type, PyFloat_Type, PyBool_Type, PyUnicode_Type, _Py_NoneStruct, _Py_TrueStruct;
}

namespace specstate::binding {

namespace {

/// A tensor type that may cross so. Python keeps it, its table and its method alive.
struct Type {
  const void* type;
  const DLPackExchangeAPI* api;
  void* signs;  // torch's function that says which of its bits (conjugate, negative) a tensor has, in a dict; null for other frameworks
};
struct Known {
  std::array<Type, 16> types;
  std::atomic<std::size_t> count = 0;
  std::mutex adding;

  const Type* find(const void* type) const {
    for (std::size_t i = 0, n = count.load(std::memory_order_acquire); i < n; ++i)
      if (types[i].type == type) return &types[i];
    return nullptr;
  }
};
Known known;

/// The arguments of one call. Shapes and strides are copied while the GIL is held: another thread may resize a tensor during the work.
class Arguments {
 public:
  /// False: the long way.
  bool read(void* tuple) {
    count_ = static_cast<std::int32_t>(PyTuple_Size(tuple));
    if (count_ < 1 || count_ > kMost) return false;
    for (std::int32_t i = 0; i < count_; ++i)
      if (!read(PyTuple_GetItem(tuple, i), values_[i])) return false;
    TVMFFIAny& stream = values_[count_ - 1];  // the last one, by agreement
    if (stream.type_index == kTVMFFINone) {
      void* current = nullptr;
      if (gpu_ != nullptr && (gpu_api_->current_work_stream == nullptr ||
                              gpu_api_->current_work_stream(gpu_->device.device_type, gpu_->device.device_id, &current) != 0)) {
        PyErr_Clear();
        return false;
      }
      stream.type_index = kTVMFFIInt;
      stream.v_int64 = reinterpret_cast<std::int64_t>(current);
    }
    return stream.type_index == kTVMFFIInt && stream.v_int64 >= 0;
  }
  const TVMFFIAny* values() const { return values_.data(); }
  std::int32_t count() const { return count_; }

 private:
  static constexpr std::int32_t kMost = 64;
  struct Tensor {
    DLTensor t;
    std::int64_t sizes[kMaxDims], strides[kMaxDims];
  };

  bool read(void* x, TVMFFIAny& value) {
    value.type_index = kTVMFFINone;
    value.zero_padding = 0;
    value.v_int64 = 0;
    if (x == &_Py_NoneStruct) return true;
    void* const type = PyObject_Type(x);
    Py_DecRef(type);  // x holds it
    if (last_ != nullptr && type == last_->type) return read(x, *last_, value);
    if (type == &PyLong_Type) {
      int overflow = 0;
      value.type_index = kTVMFFIInt;
      value.v_int64 = PyLong_AsLongLongAndOverflow(x, &overflow);
      return overflow == 0;
    }
    if (type == &PyFloat_Type) {
      value.type_index = kTVMFFIFloat;
      value.v_float64 = PyFloat_AsDouble(x);
      return true;
    }
    if (type == &PyBool_Type) {
      value.type_index = kTVMFFIBool;
      value.v_int64 = x == &_Py_TrueStruct;
      return true;
    }
    if (type == &PyUnicode_Type) {
      value.type_index = kTVMFFIRawStr;
      value.v_c_str = PyUnicode_AsUTF8AndSize(x, nullptr);
      if (value.v_c_str == nullptr) PyErr_Clear();
      return value.v_c_str != nullptr;
    }
    last_ = known.find(type);
    return last_ != nullptr && read(x, *last_, value);
  }

  bool read(void* x, const Type& type, TVMFFIAny& value) {
    const DLPackExchangeAPI& api = *type.api;
    Tensor& tensor = tensors_[num_tensors_++];
    DLTensor& t = tensor.t;
    if (api.dltensor_from_py_object_no_sync(x, &t) != 0) {
      PyErr_Clear();
      return false;
    }
    if (t.ndim > kMaxDims) return false;
    const auto bytes = static_cast<std::size_t>(t.ndim) * sizeof(std::int64_t);
    if (bytes > 0) t.shape = static_cast<std::int64_t*>(std::memcpy(tensor.sizes, t.shape, bytes));
    if (bytes > 0 && t.strides != nullptr) t.strides = static_cast<std::int64_t*>(std::memcpy(tensor.strides, t.strides, bytes));
    if (negative(x, t, type)) return false;
    if (gpu_ == nullptr && t.device.device_type == kDLCUDA) gpu_ = &t, gpu_api_ = &api;
    value.type_index = kTVMFFIDLTensorPtr;
    value.v_ptr = &t;
    return true;
  }

  /// May the memory hold the numbers with the other sign? torch gives its negative bit to the imaginary part of a conjugate, a view of which has even
  /// strides. Those are asked: `is_neg` would give the GIL back, which a daemon thread does not survive where the interpreter ends.
  static bool negative(void* x, const DLTensor& t, const Type& type) {
    if (type.signs == nullptr || t.dtype.code != kDLFloat || t.dtype.bits < 16) return false;
    for (int i = 0; i < t.ndim; ++i)
      if (t.shape[i] == 0 || (t.shape[i] > 1 && t.strides != nullptr && t.strides[i] % 2 != 0)) return false;
    void* const bits = PyObject_CallFunctionObjArgs(type.signs, x, static_cast<void*>(nullptr));
    const bool none = bits != nullptr && PyObject_Size(bits) == 0;
    if (bits == nullptr)
      PyErr_Clear();
    else
      Py_DecRef(bits);
    return !none;
  }

  std::array<TVMFFIAny, kMost> values_;
  std::array<Tensor, kMost> tensors_;
  std::int32_t count_ = 0, num_tensors_ = 0;
  const Type* last_ = nullptr;  // what the tensor before was
  // The first tensor on a GPU, and its framework: whose current stream is the call's.
  const DLTensor* gpu_ = nullptr;
  const DLPackExchangeAPI* gpu_api_ = nullptr;
};

/// Tensors of this type (its address) cross at once from now on, if its table (the address of a capsule) can show one without an owner.
/// signs: the address of what tells a tensor's bits, or 0.
bool add_type(std::int64_t type, std::int64_t capsule, std::int64_t signs) {
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(reinterpret_cast<void*>(capsule), "dlpack_exchange_api"));
  if (api == nullptr) PyErr_Clear();
  if (api == nullptr || api->header.version.major != DLPACK_MAJOR_VERSION || api->dltensor_from_py_object_no_sync == nullptr) return false;
  const std::lock_guard<std::mutex> lock(known.adding);
  const auto* const address = reinterpret_cast<const void*>(type);
  const std::size_t n = known.count;
  if (known.find(address) != nullptr) return true;
  if (n == known.types.size()) return false;
  known.types[n] = {address, api, reinterpret_cast<void*>(signs)};
  known.count.store(n + 1, std::memory_order_release);
  return true;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_type, add_type);

}  // namespace specstate::binding

/// at_once(f, address of the tuple of its arguments) -> was f called?
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_at_once(void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  namespace ffi = tvm::ffi;
  if (num_args != 2 || args[0].type_index != kTVMFFIFunction || args[1].type_index != kTVMFFIInt)
    throw ffi::Error("TypeError", "at_once: expected a function and the address of a tuple.", "");
  specstate::binding::Arguments arguments;
  bool called = arguments.read(reinterpret_cast<void*>(args[1].v_int64));
  if (called) {
    const auto* const f = static_cast<const TVMFFIFunctionCell*>(TVMFFIFunctionGetCellPtr(args[0].v_obj));
    TVMFFIAny nothing{};
    if (f->safe_call(args[0].v_obj, arguments.values(), arguments.count(), &nothing) != 0) {
      ffi::Error error = ffi::detail::MoveFromSafeCallRaised();
      if (error.kind() != "TypeError" && error.kind() != "SpecstateArgument") throw error;
      called = false;  // an argument that the export cannot take: seen before it runs
    }
  }
  result->type_index = kTVMFFIBool;
  result->v_int64 = called;
  TVM_FFI_SAFE_CALL_END();
}
