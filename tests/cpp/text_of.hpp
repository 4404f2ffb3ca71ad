#pragma once
// What a call says when it refuses; "" if it does not.
#include <functional>
#include <string>

#include "specstate/error.hpp"

namespace specstate::testing {

inline std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace specstate::testing
