# `cmake --install`: headers, the shared library, the command, the embedded model, a CMake package and a pkg-config file.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# A wheel's libraries lie beside each other; it brings its own file for NAMELINK (cmake/wheel.cmake).
if(SPECSTATE_WHEEL)
  set(namelink NAMELINK_SKIP)
  set_target_properties(specstate specstate_ffi PROPERTIES INSTALL_RPATH "$ORIGIN")
  set_target_properties(specstate_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
endif()
install(TARGETS specstate EXPORT specstate-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${namelink}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/specstate ${CMAKE_BINARY_DIR}/include/specstate DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(EXISTS ${PROJECT_SOURCE_DIR}/models)
  install(DIRECTORY models DESTINATION ${CMAKE_INSTALL_DATADIR}/specstate)
endif()
if(TARGET specstate_cli)
  install(TARGETS specstate_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/specstate)
install(EXPORT specstate-targets NAMESPACE specstate:: DESTINATION ${package_dir})
configure_package_config_file(cmake/specstate-config.cmake.in ${CMAKE_BINARY_DIR}/specstate-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/specstate-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/specstate-config.cmake ${CMAKE_BINARY_DIR}/specstate-config-version.cmake DESTINATION ${package_dir})
file(RELATIVE_PATH SPECSTATE_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/specstate.pc.in ${CMAKE_BINARY_DIR}/specstate.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/specstate.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
