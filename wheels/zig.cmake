# A CMake toolchain that cross-compiles the kernels with zig, of the package `ziglang` on PyPI. The environment says which
# program it is, ZIG, and for which machine it compiles, ZIG_TARGET: aarch64-linux-gnu.2.17 is a processor and a glibc.
string(REGEX MATCH "^([^-]*)-([^-.]*)" _ $ENV{ZIG_TARGET})
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
set(systems_linux Linux)
set(systems_macos Darwin)
set(systems_windows Windows)
set(CMAKE_SYSTEM_NAME ${systems_${CMAKE_MATCH_2}})
set(CMAKE_C_COMPILER "$ENV{ZIG}" cc -target $ENV{ZIG_TARGET})
set(CMAKE_CXX_COMPILER "$ENV{ZIG}" c++ -target $ENV{ZIG_TARGET})
set(CMAKE_CUDA_HOST_COMPILER c++ CACHE FILEPATH "nvcc does not take zig; zig links what it compiles")
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux") # zig does not know --exclude-libs
  set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map")
endif()
set(CMAKE_STRIP "") # knows the formats of this machine alone
set(CMAKE_INSTALL_NAME_TOOL true)
set(VILONGHORN_MARCH -march=x86_64_ CACHE STRING "zig's option for an instruction set, without v2, v3 or v4")
