#pragma once
// A read-only file in memory, and a small text file.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace specstate::runtime {

/// A whole file, mapped read-only and private. Movable; unmaps in the destructor.
class MappedFile {
 public:
  MappedFile() = default;
  /// Throws Error(kRuntime) naming the path if it cannot be opened, is not a regular file or cannot be mapped.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The content of a file of at most `limit` bytes; throws Error(kRuntime) naming the path otherwise.
std::string read_text(const std::string& path, std::size_t limit);

}  // namespace specstate::runtime
