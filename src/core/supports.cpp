#include "specstate/supports.hpp"

namespace specstate {

namespace {
thread_local int depth = 0;
}

CheckOnly::CheckOnly() noexcept { ++depth; }
CheckOnly::~CheckOnly() { --depth; }
bool CheckOnly::active() noexcept { return depth > 0; }

}  // namespace specstate
