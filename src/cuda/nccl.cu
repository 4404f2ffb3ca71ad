#include <dlfcn.h>

#include <cstdlib>

#include "cuda/launch.hpp"
#include "cuda/nccl.hpp"

namespace specstate::cuda {

namespace {

using Comm = void*;
using Result = int;  // ncclResult_t: 0 is success
constexpr Result kInProgress = 7;
constexpr int kBytes = 0;  // ncclInt8

struct Library {
  Result (*id)(Nccl::Id*) = nullptr;
  Result (*init)(Comm*, int, Nccl::Id, int) = nullptr;
  Result (*gather)(const void*, void*, std::size_t, int, Comm, cudaStream_t) = nullptr;
  Result (*destroy)(Comm) = nullptr;
  Result (*abort)(Comm) = nullptr;
  const char* (*text)(Result) = nullptr;
  const char* (*last)(Comm) = nullptr;  // may be missing: since 2.13
  std::string problem;

  Library() {
    // Read when a communicator is made. A program that uses NVLink multicast can put GPUs that others share out of service.
    ::setenv("NCCL_NVLS_ENABLE", "0", 1);
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);  // stays loaded
    if (!library) {
      const char* const why = dlerror();
      problem = std::string("libnccl.so.2 was not found (its folder belongs into LD_LIBRARY_PATH): ") + (why ? why : "no reason given");
      return;
    }
    const auto load = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::remove_reference_t<decltype(f)>>(dlsym(library, name));
      if (!f && problem.empty()) problem = std::string("libnccl.so.2 has no ") + name;
    };
    load(id, "ncclGetUniqueId"), load(init, "ncclCommInitRank"), load(gather, "ncclAllGather"), load(destroy, "ncclCommDestroy");
    load(abort, "ncclCommAbort"), load(text, "ncclGetErrorString");
    last = reinterpret_cast<decltype(last)>(dlsym(library, "ncclGetLastError"));
  }
};
const Library& library() {
  static const Library l;
  return l;
}

void check(Result result, const char* what, Comm comm) {
  if (result == 0 || result == kInProgress) return;
  std::string text = std::string(what) + ": " + library().text(result);
  if (library().last)
    if (const char* more = library().last(comm); more && *more) text += std::string(": ") + more;
  throw Error(ErrorKind::kCuda, text);
}

}  // namespace

std::string Nccl::missing() { return library().problem; }

Nccl::Id Nccl::make_id() {
  Id id{};
  check(library().id(&id), "ncclGetUniqueId", nullptr);
  return id;
}

Nccl::Nccl(const Id& id, int rank, int size) {
  if (const std::string why = missing(); !why.empty()) throw Error(ErrorKind::kCuda, "NCCL: " + why);
  check(library().init(&comm_, size, id, rank), "ncclCommInitRank", nullptr);
}
Nccl::~Nccl() {
  if (comm_) (void)library().destroy(comm_);
}

void Nccl::all_gather(const void* from, void* to, std::int64_t bytes, Stream stream) const {
  if (!comm_) throw Error(ErrorKind::kCuda, "ncclAllGather: the communicator was aborted");
  check(library().gather(from, to, static_cast<std::size_t>(bytes), kBytes, comm_, native(stream)), "ncclAllGather", comm_);
}

void Nccl::abort() noexcept {
  if (comm_) (void)library().abort(comm_);
  comm_ = nullptr;
}

}  // namespace specstate::cuda
