# Compiler flags in one place. CMAKE_CXX_STANDARD is left alone: it would leak into CUDA, where CMake 3.25 rejects 20.
add_library(specstate_flags INTERFACE)
target_compile_options(specstate_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-std=c++20 -Wall -Wextra -Wno-unused-parameter -Wno-dangling-else>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>  # false alarms of gcc 12 on std::string
  # No contraction behind our back: a multiply-add is fused where the source says so, everywhere else it is not. Otherwise one
  # formula, inlined in two places, could round in two ways, and speculative decoding would stop being bit-identical.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
foreach(s IN LISTS SPECSTATE_SANITIZE)
  target_compile_options(specstate_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${s} -fno-omit-frame-pointer>)
  target_link_options(specstate_flags INTERFACE -fsanitize=${s})
endforeach()
if("undefined" IN_LIST SPECSTATE_SANITIZE)
  target_compile_options(specstate_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
endif()
if(SPECSTATE_FUZZ)
  target_compile_options(specstate_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
  target_link_options(specstate_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
