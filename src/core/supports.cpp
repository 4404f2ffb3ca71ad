#include "specstate/supports.hpp"

#include "core/dispatch.hpp"

namespace specstate {

namespace {
thread_local int depth = 0;
}

bool cuda_built() noexcept { return core::cuda_built(); }

CheckOnly::CheckOnly() noexcept { ++depth; }
CheckOnly::~CheckOnly() { --depth; }
bool CheckOnly::active() noexcept { return depth > 0; }

}  // namespace specstate
