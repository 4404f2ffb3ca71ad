# Compiler flags in one place. CMAKE_CXX_STANDARD is left alone: it would leak into CUDA, where CMake 3.25 rejects 20.
add_library(specstate_flags INTERFACE)
target_compile_options(specstate_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX,CUDA>:-std=c++20>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wno-dangling-else>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>  # false alarms of gcc 12 on std::string
  # No contraction behind our back: a multiply-add is fused where the source says so, everywhere else it is not. Otherwise one
  # formula, inlined in two places, could round in two ways, and speculative decoding would stop being bit-identical.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
if(SPECSTATE_WITH_CUDA)
  target_compile_definitions(specstate_flags INTERFACE SPECSTATE_CUDA="${SPECSTATE_CUDA_ARCHITECTURES}")
  # --fmad=false: as above, on the GPU. --expt-relaxed-constexpr: constexpr functions (of TensorView, of the layouts) are device
  # functions too. -lineinfo: profilers and sanitizers name lines; the code is the same.
  target_compile_options(specstate_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:--fmad=false --expt-relaxed-constexpr -lineinfo -Xfatbin -compress-all -Xcompiler -Wall,-Wextra,-Wno-unused-parameter,-ffp-contract=off>")
  foreach(arch IN LISTS SPECSTATE_CUDA_ARCHITECTURES)
    target_compile_options(specstate_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-gencode arch=compute_${arch},code=sm_${arch}>")
  endforeach()
endif()
foreach(s IN LISTS SPECSTATE_SANITIZE)
  target_compile_options(specstate_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${s} -fno-omit-frame-pointer>)
  target_link_options(specstate_flags INTERFACE -fsanitize=${s})
endforeach()
if(SPECSTATE_PYTHON AND "address" IN_LIST SPECSTATE_SANITIZE)
  # Python loads the binding (tools/asan_python): the runtime is one shared library, which Python can load before everything else.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libclang_rt.asan-${CMAKE_SYSTEM_PROCESSOR}.so
    OUTPUT_VARIABLE asan_runtime OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  cmake_path(GET asan_runtime PARENT_PATH asan_folder)
  target_link_options(specstate_flags INTERFACE -shared-libasan -Wl,-rpath,${asan_folder})
endif()
if("undefined" IN_LIST SPECSTATE_SANITIZE)
  target_compile_options(specstate_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
endif()
if(SPECSTATE_FUZZ)
  target_compile_options(specstate_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
  target_link_options(specstate_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
