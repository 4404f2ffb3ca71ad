#include "core/match.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "specstate/supports.hpp"

namespace specstate::core {

void throw_value(const std::string& text) { throw Error(ErrorKind::kValue, text); }
void throw_not_implemented(const std::string& text) { throw Error(ErrorKind::kNotImplemented, text); }
void throw_runtime(const std::string& text) { throw Error(ErrorKind::kRuntime, text); }

std::string number_text(double x) {
  char text[32];
  const auto narrow = static_cast<float>(x);
  const auto end =
      static_cast<double>(narrow) == x ? std::to_chars(text, text + sizeof text, narrow) : std::to_chars(text, text + sizeof text, x);
  return std::string(text, end.ptr);
}

void rename(const Error& error, Names names) {
  std::string text = error.what();
  for (const auto& [before, after] : {std::pair{": ", ": "}, {"overlaps ", "."}, {"together with ", ","}})
    for (const auto& [ours, theirs] : names)
      if (const auto at = text.find(std::string(before) + ours + after); at != std::string::npos) {
        text.replace(at + std::string_view(before).size(), std::string_view(ours).size(), theirs);
        break;
      }
  throw Error(error.kind(), text);
}

void Checker::fail(std::string_view name, std::string_view expected, std::string_view got) const {
  throw_value(std::string(op_).append(": ").append(name).append(": expected ").append(expected).append(", got ").append(got).append("."));
}

void ArgCheck::fail(const std::string& expected, const std::string& got) const {
  if (!exact_.empty()) throw_value(std::string(exact_));
  owner_.fail(name_, expected, got);
}

ArgCheck& ArgCheck::required() {
  if (!t_.given()) fail("a tensor", "none");
  return *this;
}

ArgCheck& ArgCheck::dtype(std::initializer_list<DType> expected) {
  if (!t_.given()) return *this;
  if (std::find(expected.begin(), expected.end(), t_.dtype) != expected.end()) return *this;
  std::string names;
  for (DType d : expected) names += (names.empty() ? "" : " or ") + std::string(name_of(d));
  fail("dtype " + names, name_of(t_.dtype));
}

ArgCheck& ArgCheck::dtype_of(const char* other, const TensorView& t) {
  if (t_.given() && t_.dtype != t.dtype)
    fail(std::string("dtype ").append(name_of(t.dtype)).append(" as ").append(other), name_of(t_.dtype));
  return *this;
}

ArgCheck& ArgCheck::ndim(int expected) {
  if (!t_.given() || t_.ndim == expected) return *this;
  fail(std::to_string(expected) + " dimensions", "shape " + shape_text(t_));
}

ArgCheck& ArgCheck::shape(std::initializer_list<Dim> expected) {
  if (!t_.given()) return *this;
  bool ok = t_.ndim == static_cast<int>(expected.size());
  int i = 0;
  for (const Dim& d : expected) {
    if (!ok) break;
    const std::int64_t n = t_.sizes[i++];
    switch (d.kind_) {
      case Dim::Kind::kExact: ok = n == d.value_; break;
      case Dim::Kind::kAny: break;
      case Dim::Kind::kAtLeast: ok = n >= d.value_; break;
      case Dim::Kind::kSym: ok = !d.sym_->bound() || n == d.sym_->value(); break;
    }
  }
  if (ok) {  // bind only when the whole shape fits
    i = 0;
    for (const Dim& d : expected) {
      if (d.kind_ == Dim::Kind::kSym && !d.sym_->bound()) d.sym_->value_ = t_.sizes[i];
      ++i;
    }
    // A symbol that occurs twice in one shape binds at its first place.
    i = 0;
    for (const Dim& d : expected) {
      if (d.kind_ == Dim::Kind::kSym && d.sym_->value() != t_.sizes[i]) ok = false;
      ++i;
    }
    if (ok) return *this;
  }
  std::string text = "[";
  for (const Dim& d : expected) {
    if (text.size() > 1) text += ", ";
    switch (d.kind_) {
      case Dim::Kind::kExact: text += std::to_string(d.value_); break;
      case Dim::Kind::kAny: text += d.name_; break;
      case Dim::Kind::kAtLeast: text += (d.name_ ? std::string(d.name_) + " " : std::string()) + ">= " + std::to_string(d.value_); break;
      case Dim::Kind::kSym:
        text += d.sym_->name();
        if (d.sym_->bound()) text += "=" + std::to_string(d.sym_->value());
        break;
    }
  }
  fail("shape " + text + "]", shape_text(t_));
}

ArgCheck& ArgCheck::inner_contiguous(int dims) {
  if (!t_.given() || t_.inner_contiguous(dims)) return *this;
  std::string got = "strides (";
  for (int i = 0; i < t_.ndim; ++i) got += (i ? ", " : "") + std::to_string(t_.strides[i]);
  fail(dims == 1 ? "a dense last dimension" : "the last " + std::to_string(dims) + " dimensions dense row-major",
       got + ") for shape " + shape_text(t_));
}

ArgCheck& ArgCheck::forward_strides() {
  if (!t_.given()) return *this;
  for (int i = 0; i < t_.ndim; ++i)
    if (t_.sizes[i] > 1 && t_.strides[i] < 0) fail("strides >= 0", "stride " + std::to_string(t_.strides[i]));
  return *this;
}

namespace {
/// Without the product of the sizes, which may be more than 64 bits hold.
bool empty(const TensorView& t) { return std::find(t.sizes, t.sizes + t.ndim, 0) != t.sizes + t.ndim; }
}  // namespace

ArgCheck& ArgCheck::written() {
  if (!t_.given()) return *this;
  owner_.see(name_, t_, false, bytes_);  // products of strides and sizes fit
  if (empty(t_)) return *this;
  std::pair<std::int64_t, std::int64_t> dims[kMaxDims];  // (|stride|, size), rising
  int n = 0;
  for (int i = 0; i < t_.ndim; ++i) {
    if (t_.sizes[i] <= 1) continue;
    const std::pair<std::int64_t, std::int64_t> dim{std::abs(t_.strides[i]), t_.sizes[i]};
    int at = n++;
    for (; at > 0 && dim < dims[at - 1]; --at) dims[at] = dims[at - 1];
    dims[at] = dim;
  }
  std::int64_t extent = 0;  // largest offset reachable with the smaller strides
  for (int i = 0; i < n; ++i) {
    const auto& [stride, size] = dims[i];
    if (stride <= extent) fail("elements that do not share memory", "stride " + std::to_string(stride) + " for shape " + shape_text(t_));
    extent += stride * (size - 1);
  }
  owner_.see(name_, t_, true, bytes_);
  return *this;
}

ArgCheck& ArgCheck::memory() {
  if (t_.given()) owner_.see(name_, t_, false, bytes_);
  return *this;
}

ArgCheck& ArgCheck::as_bytes() {
  bytes_ = true;
  return memory();
}

ArgCheck& ArgCheck::same_device() {
  if (!t_.given()) return *this;
  owner_.see(name_, t_, false, bytes_);
  if (owner_.device_of_ == nullptr) {
    owner_.device_ = t_.device;
    owner_.device_of_ = name_;
  } else if (!(t_.device == owner_.device_)) {
    fail("device " + name_of(owner_.device_) + " (where " + owner_.device_of_ + " is)", name_of(t_.device));
  }
  return *this;
}

ArgCheck& ArgCheck::aligned(std::int64_t bytes) {
  if (!t_.given() || t_.numel() == 0) return *this;
  const auto address = reinterpret_cast<std::uintptr_t>(t_.data);
  if (address % static_cast<std::uintptr_t>(bytes) != 0)
    fail("a data pointer that is a multiple of " + std::to_string(bytes) + " bytes",
         "remainder " + std::to_string(address % static_cast<std::uintptr_t>(bytes)));
  return *this;
}

namespace {

/// Bytes from the view's lowest to behind its highest, relative to its pointer, over the dimensions of stride < `below` bytes.
std::pair<std::int64_t, std::int64_t> extent(const TensorView& t, std::int64_t below = std::numeric_limits<std::int64_t>::max()) {
  const std::int64_t item = size_of(t.dtype);
  std::int64_t low = 0, high = item;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.sizes[i] == 1) continue;  // of any stride
    const std::int64_t step = t.strides[i] * item;
    if (std::abs(step) < below) (step < 0 ? low : high) += step * (t.sizes[i] - 1);
  }
  return {low, high};
}

/// Do 64 bits hold the product of its sizes (but those of 0) and how far its bytes reach? Then products of indices and strides fit, too. (A broadcast or
/// an empty view may claim any shape.)
bool in_64_bits(const TensorView& t) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  const std::int64_t item = size_of(t.dtype);
  std::int64_t elements = item, reach = item;
  for (int i = 0; i < t.ndim; ++i) {
    std::int64_t step = 0;
    if (t.sizes[i] <= 1) continue;
    if (__builtin_mul_overflow(elements, t.sizes[i], &elements) || __builtin_mul_overflow(t.strides[i], item, &step) || step < -kMost ||
        __builtin_mul_overflow(std::abs(step), t.sizes[i] - 1, &step) || __builtin_add_overflow(reach, step, &reach))
      return false;
  }
  return reach < kMost;
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.device == b.device && a.ndim == b.ndim &&
         std::equal(a.sizes, a.sizes + a.ndim, b.sizes) && std::equal(a.strides, a.strides + a.ndim, b.strides);
}

/// The dimension of the largest stride among those of size > 1, or -1.
int outermost(const TensorView& t) {
  int best = -1;
  for (int i = 0; i < t.ndim; ++i)
    if (t.sizes[i] > 1 && (best < 0 || std::abs(t.strides[i]) > std::abs(t.strides[best]))) best = i;
  return best;
}

}  // namespace

bool may_overlap(const TensorView& a, const TensorView& b) {
  if (!a.given() || !b.given() || a.numel() == 0 || b.numel() == 0) return false;
  const std::int64_t apart = reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  // Views that are woven into one buffer (state and windows of a slot, q and k of a row) step by the same pitch. While all of what is
  // inside one step of both fits the pitch, only equal steps can meet: look inside.
  TensorView x = a, y = b;
  for (;;) {
    const auto [x0, x1] = extent(x);
    const auto [y0, y1] = extent(y);
    if (x1 <= apart + y0 || apart + y1 <= x0) return false;
    const int i = outermost(x), j = outermost(y);
    if (i < 0 || j < 0) return true;
    const std::int64_t pitch = std::abs(x.strides[i]) * size_of(x.dtype);
    if (pitch != std::abs(y.strides[j]) * size_of(y.dtype) || x.strides[i] < 0 || y.strides[j] < 0) return true;
    x.sizes[i] = y.sizes[j] = 1;
    const auto [u0, u1] = extent(x);
    const auto [v0, v1] = extent(y);
    if (std::max(u1, apart + v1) - std::min(u0, apart + v0) > pitch) return true;
  }
}

void Checker::see(const char* name, const TensorView& t, bool written, bool bytes) {
  if (!seen_.empty()) {
    Seen& last = seen_.back();
    if (last.name == name && last.t.data == t.data && last.item == item_) {
      last.written |= written;
      return;
    }
  }
  // What all items read of one place is seen once.
  if (!written)
    for (std::size_t i = 0; i < first_item_; ++i)
      if (const Seen& first = seen_[i]; first.name == name && same_view(first.t, t)) return;
  for (int i = 0; i < t.ndim; ++i)
    if (t.sizes[i] < 0) fail(name, "sizes of 0 or more", "shape " + shape_text(t));
  const std::int64_t item = size_of(t.dtype);
  if (item == 0) fail(name, "a dtype", "unknown (" + std::to_string(static_cast<int>(t.dtype)) + ")");
  if (!in_64_bits(t)) fail(name, "elements and bytes that 64 bits can count", "shape " + shape_text(t));
  if (empty(t)) return;
  if (t.data == nullptr) fail(name, "memory for shape " + shape_text(t), "a null pointer");
  const auto address = reinterpret_cast<std::intptr_t>(t.data);
  if (!bytes && address % item != 0)
    fail(name, "a data pointer that is a multiple of " + std::to_string(item) + " bytes",
         "remainder " + std::to_string(address & (item - 1)));
  const auto [low, high] = extent(t);
  if (seen_.empty()) seen_.reserve(24);
  seen_.push_back({name, t, address + low, address + high, written, item_});
}

bool Checker::clearly_apart() const {
  std::vector<const Seen*> outs;
  for (const Seen& s : seen_)
    if (s.written) outs.push_back(&s);
  std::sort(outs.begin(), outs.end(), [](const Seen* a, const Seen* b) { return a->low < b->low; });
  for (std::size_t i = 1; i < outs.size(); ++i)
    if (outs[i]->low < outs[i - 1]->high) return false;
  for (const Seen& s : seen_) {  // the last output that begins before its end reaches furthest of those
    if (s.written) continue;
    const auto next = std::lower_bound(outs.begin(), outs.end(), s.high, [](const Seen* out, std::intptr_t end) { return out->low < end; });
    if (next != outs.begin() && next[-1]->high > s.low) return false;
  }
  return true;
}

void Checker::outputs_apart() const {
  if (seen_.size() > 32 && clearly_apart()) return;
  for (const Seen& out : seen_) {
    if (!out.written) continue;
    for (const Seen& other : seen_) {
      if (out.high <= other.low || other.high <= out.low) continue;
      if (other.written && &other > &out) continue;  // of two outputs the later one is named
      const bool same_name = std::string_view(out.name) == other.name;
      if ((same_name && out.item == other.item) || !may_overlap(out.t, other.t)) continue;
      fail(out.name, "memory of its own", std::string("memory that overlaps ") + (same_name ? "another of them" : other.name));
    }
  }
}

bool host_reads(const TensorView& t) { return t.device.type == DeviceType::kCpu && !CheckOnly::active(); }

std::int64_t load_index(const TensorView& t, std::int64_t i) {
  const std::int64_t offset = i * t.strides[0];
  return t.dtype == DType::kInt64 ? t.as<std::int64_t>()[offset] : t.as<std::int32_t>()[offset];
}

}  // namespace specstate::core
