#pragma once
// The argument matcher: every operation's check.cpp is a list of these lines.
//
//   Sym B{"B"}, W{"W"};
//   Checker check("verify_greedy");
//   check.arg("candidates", p.candidates).required().dtype({DType::kInt32, DType::kInt64}).shape({B, W});
//   check.arg("target_argmax", p.target_argmax).required().dtype(p.candidates.dtype).shape({B, W});
//
// A symbolic size binds at its first use and is compared after that. The default text names the operation, the argument,
// what was expected and what was got; `.text("...")` replaces it by an exact text for the checks that follow it.
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/float_env.hpp"
#include "specstate/error.hpp"
#include "specstate/tensor.hpp"

namespace specstate::core {

[[noreturn]] void throw_value(const std::string& text);
[[noreturn]] void throw_not_implemented(const std::string& text);
[[noreturn]] void throw_runtime(const std::string& text);

/// A number as errors show it: the fewest digits that tell it from its neighbours (of float32, where it is one).
std::string number_text(double x);

/// A named size, unbound until the first shape that contains it.
class Sym {
 public:
  explicit Sym(const char* name) : name_(name) {}
  Sym(const char* name, std::int64_t value) : name_(name), value_(value) {}
  bool bound() const { return value_ >= 0; }
  std::int64_t value() const { return value_; }
  operator std::int64_t() const { return value_; }
  const char* name() const { return name_; }

 private:
  friend class ArgCheck;
  const char* name_;
  std::int64_t value_ = -1;
};

/// One expected size: a number, a symbol, anything, or "at least".
class Dim {
 public:
  Dim(std::int64_t exact) : kind_(Kind::kExact), value_(exact) {}  // NOLINT: implicit on purpose
  Dim(int exact) : Dim(static_cast<std::int64_t>(exact)) {}        // NOLINT
  Dim(Sym& sym) : kind_(Kind::kSym), sym_(&sym) {}                 // NOLINT
  static Dim any(const char* name = "*") { return Dim(Kind::kAny, 0, name); }
  static Dim at_least(std::int64_t n, const char* name = nullptr) { return Dim(Kind::kAtLeast, n, name); }

 private:
  friend class ArgCheck;
  enum class Kind { kExact, kSym, kAny, kAtLeast };
  Dim(Kind kind, std::int64_t value, const char* name) : kind_(kind), value_(value), name_(name) {}
  Kind kind_;
  std::int64_t value_ = 0;
  Sym* sym_ = nullptr;
  const char* name_ = nullptr;
};

class Checker;

class ArgCheck {
 public:
  /// The argument must be given.
  ArgCheck& required();
  ArgCheck& dtype(DType expected) { return dtype({expected}); }
  ArgCheck& dtype(std::initializer_list<DType> expected);
  /// That of another argument, whose name the text says.
  ArgCheck& dtype_of(const char* other, const TensorView& t);
  ArgCheck& ndim(int expected);
  ArgCheck& shape(std::initializer_list<Dim> expected);
  /// The last `dims` dimensions must be dense row-major.
  ArgCheck& inner_contiguous(int dims);
  /// Every stride must be >= 0 (a negative stride is refused, not misread).
  ArgCheck& forward_strides();
  /// The call writes it: distinct elements must not share memory (no stride of 0 over a size > 1, no self-overlap by sorted strides),
  /// and `Checker::outputs_apart` keeps it apart from everything else.
  ArgCheck& written();
  /// Same device as the first argument of this checker that was given.
  ArgCheck& same_device();
  ArgCheck& aligned(std::int64_t bytes);
  /// There is memory at a place for its elements, on whatever device: what `same_device()` and `written()` ask, too.
  ArgCheck& memory();
  /// The same, but its rows are moved as bytes, so it may lie at any address.
  ArgCheck& as_bytes();
  /// Exact text of the ValueError of the checks that follow (empty: back to the default text). It must outlive them.
  ArgCheck& text(std::string_view exact) {
    exact_ = exact;
    return *this;
  }

 private:
  friend class Checker;
  ArgCheck(Checker& owner, const char* name, const TensorView& t) : owner_(owner), name_(name), t_(t) {}
  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;

  Checker& owner_;
  const char* name_;
  const TensorView& t_;
  bool bytes_ = false;
  std::string_view exact_;
};

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}
  /// The checks of an argument that was not given are skipped, except `required()`.
  ArgCheck arg(const char* name, const TensorView& t) {
    if (t.ndim > kMaxDims) fail(name, "at most 8 dimensions", std::to_string(t.ndim));
    return ArgCheck(*this, name, t);
  }
  /// "{op}: {name}: expected {expected}, got {got}."
  [[noreturn]] void fail(std::string_view name, std::string_view expected, std::string_view got) const;
  /// Texts that cost something to make are made even where all is well: on the way of every call, `if (!ok) check.fail(..)` instead.
  void require(bool ok, std::string_view name, std::string_view expected, std::string_view got) const {
    if (!ok) fail(name, expected, got);
  }
  /// An array of `count` entries behind a plain pointer, as in `followers` and `num_followers`.
  void array(std::string_view name, const void* entries, std::string_view count_name, std::int64_t count) const {
    if (count < 0) fail(count_name, "0 or more", std::to_string(count));
    if (count > 0 && entries == nullptr) fail(name, std::to_string(count) + " entries", "a null pointer");
  }
  /// What the call writes shares memory with nothing else that it was given: every argument that went through `same_device()` or
  /// `written()`, under another name. The names must still be alive.
  void outputs_apart() const;
  /// Of a call over several items (layers) with the same argument names: what comes now belongs to the next one, and is kept apart
  /// from the outputs of all.
  void next_item() {
    if (++item_ == 2) first_item_ = seen_.size();
  }
  const char* op() const { return op_; }
  /// Device of the first `same_device()` argument.
  const Device& device() const { return device_; }

 private:
  friend class ArgCheck;
  struct Seen {
    const char* name;
    TensorView t;
    std::intptr_t low, high;  // addresses of its bytes
    bool written;
    int item;
  };
  /// Of many arguments in less time than each output beside each: no two ranges of addresses meet.
  bool clearly_apart() const;
  void see(const char* name, const TensorView& t, bool written, bool bytes);

  DefaultFloatEnv env_;  // what a check computes from numbers does not depend on the caller's modes either
  const char* op_;
  std::vector<Seen> seen_;
  int item_ = 0;
  std::size_t first_item_ = 0;  // so many of `seen_` are the first item's, or before it
  Device device_{};
  const char* device_of_ = nullptr;
};

/// What the library calls an argument, and what the caller calls it.
using Names = std::initializer_list<std::pair<const char*, const char*>>;
[[noreturn]] void rename(const Error& error, Names names);
/// Runs `f`; an error that names our arguments leaves under the names that the caller used.
template <class F>
void with_names(Names names, F&& f) {
  try {
    f();
  } catch (const Error& error) {
    rename(error, names);
  }
}

/// True if the two views may touch a common byte; false is certain, also for views that are woven into one buffer.
bool may_overlap(const TensorView& a, const TensorView& b);

/// Does a check look at what `t` holds? Not on a GPU, and not while only shapes and dtypes are asked about (CheckOnly).
bool host_reads(const TensorView& t);

/// int32 or int64 indices of any stride, read as int64. Copied at check time, so a backend never re-reads the caller's memory.
std::int64_t load_index(const TensorView& t, std::int64_t i);

}  // namespace specstate::core
