#pragma once
// Symbol visibility: the shared library hides everything that is not marked SPECSTATE_API.
#if defined(SPECSTATE_STATIC)
#define SPECSTATE_API
#else
#define SPECSTATE_API __attribute__((visibility("default")))
#endif
