# What a wheel holds beside `cmake --install`: the binding, the type stubs, the third-party libraries with their licences. The whole
# install prefix is the folder of the Python package, so everything finds everything by relative paths.
install(TARGETS specstate_ffi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(CODE "execute_process(COMMAND \"${SPECSTATE_PYTHON_EXECUTABLE}\" \"${PROJECT_SOURCE_DIR}/tools/write_stubs.py\" \"\${CMAKE_INSTALL_PREFIX}\" COMMAND_ERROR_IS_FATAL ANY)")

# A wheel cannot hold symbolic links. One file carries the SONAME, and the name that a linker looks for is a script that points to it.
set_target_properties(specstate PROPERTIES VERSION ${PROJECT_VERSION_MAJOR} SOVERSION ${PROJECT_VERSION_MAJOR})
file(WRITE ${CMAKE_BINARY_DIR}/linker-script "INPUT(libspecstate.so.${PROJECT_VERSION_MAJOR})\n")
install(FILES ${CMAKE_BINARY_DIR}/linker-script DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libspecstate.so)

# Debian's oneTBB and Highway travel along, under the names by which the loader asks for them.
foreach(target IN ITEMS TBB::tbb hwy::hwy)
  foreach(configuration IN ITEMS NONE RELEASE RELWITHDEBINFO)
    get_target_property(location ${target} IMPORTED_LOCATION_${configuration})
    get_target_property(soname ${target} IMPORTED_SONAME_${configuration})
    if(location AND soname)
      break()
    endif()
  endforeach()
  if(NOT location OR NOT soname)
    message(FATAL_ERROR "wheel: ${target} is no shared library with a SONAME")
  endif()
  file(REAL_PATH ${location} location)
  install(PROGRAMS ${location} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME ${soname})
endforeach()

# Of these the wheel holds code: as a library, or compiled in from headers.
foreach(name IN ITEMS libtbb libhwy libfmt nlohmann-json3 libcli11)
  file(GLOB notices /usr/share/doc/${name}*/copyright)
  if(NOT notices)
    message(FATAL_ERROR "wheel: found no licence of ${name} in /usr/share/doc")
  endif()
  list(GET notices 0 notice)
  install(FILES ${notice} DESTINATION ${CMAKE_INSTALL_DOCDIR}/third_party RENAME ${name}.txt)
endforeach()
if(SPECSTATE_WITH_CUDA)
  file(WRITE ${CMAKE_BINARY_DIR}/cudart.txt "libspecstate.so contains the CUDA runtime (cudart_static) of NVIDIA's CUDA toolkit ${CUDAToolkit_VERSION}, copyright NVIDIA Corporation,\n"
    "redistributed under the CUDA Toolkit End User License Agreement (Attachment A): https://docs.nvidia.com/cuda/eula/\n")
  install(FILES ${CMAKE_BINARY_DIR}/cudart.txt DESTINATION ${CMAKE_INSTALL_DOCDIR}/third_party)
endif()

# The texts that docstrings and the package's README point to, as they lie in the sources, so that links among them hold.
set(texts ${CMAKE_INSTALL_DOCDIR})
install(FILES README.md HACKING.md CHANGELOG.md DESTINATION ${texts})
install(DIRECTORY docs examples DESTINATION ${texts} PATTERN "__pycache__" EXCLUDE)
foreach(family IN ITEMS accept draft_kv hisparse kda)
  install(FILES src/${family}/SEMANTICS.md DESTINATION ${texts}/src/${family})
endforeach()
