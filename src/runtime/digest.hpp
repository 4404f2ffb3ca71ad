#pragma once
// A 64-bit hash of committed state, to compare two runs. Not cryptographic.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace specstate::runtime {

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection that mixes all bits.
constexpr std::uint64_t mix64(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

class Digest {
 public:
  void value(std::uint64_t v) { state_ = mix64(state_ ^ v) + v; }
  void bytes(const void* data, std::size_t n) {
    const char* p = static_cast<const char*>(data);
    for (; n >= 8; n -= 8, p += 8) {
      std::uint64_t v;
      std::memcpy(&v, p, 8);
      value(v);
    }
    std::uint64_t rest = n;  // the length of the tail, so that zeros count
    for (std::size_t i = 0; i < n; ++i) rest = rest << 8 | static_cast<unsigned char>(p[i]);
    value(rest);
  }
  std::uint64_t result() const { return mix64(state_); }

 private:
  std::uint64_t state_ = 0x5EED;
};

}  // namespace specstate::runtime
