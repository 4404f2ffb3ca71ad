#include "runtime/file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/match.hpp"

namespace specstate::runtime {

namespace {

[[noreturn]] void fail(const std::string& path, const char* what) {
  core::throw_runtime(fmt::format("{}: {}: {}.", path, what, std::strerror(errno)));
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

/// An open descriptor of a regular file and its size.
std::size_t open_regular(const std::string& path, Descriptor& d) {
  // Without O_NONBLOCK a FIFO without a writer would hold us here for ever.
  d.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (d.fd < 0) fail(path, "cannot open");
  struct stat st {};
  if (::fstat(d.fd, &st) != 0) fail(path, "cannot stat");
  if (!S_ISREG(st.st_mode)) core::throw_runtime(fmt::format("{}: expected a regular file.", path));
  return static_cast<std::size_t>(st.st_size);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  Descriptor d{-1};
  size_ = open_regular(path, d);
  if (size_ == 0) return;
  void* p = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, d.fd, 0);
  if (p == MAP_FAILED) fail(path, "cannot map");
  data_ = static_cast<const std::byte*>(p);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

std::string read_text(const std::string& path, std::size_t limit) {
  Descriptor d{-1};
  const std::size_t size = open_regular(path, d);
  if (size > limit) core::throw_runtime(fmt::format("{}: expected at most {} bytes, got {}.", path, limit, size));
  std::string text(size, '\0');
  std::size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(d.fd, text.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path, "cannot read");
    if (n == 0) break;  // shrank meanwhile
    done += static_cast<std::size_t>(n);
  }
  text.resize(done);
  return text;
}

}  // namespace specstate::runtime
