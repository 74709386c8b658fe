// Everything that the library offers.
#pragma once

#include "kivi/cache.h"        // IWYU pragma: export
#include "kivi/calibration.h"  // IWYU pragma: export
#include "kivi/format.h"       // IWYU pragma: export
#include "kivi/ops.h"          // IWYU pragma: export
#include "kivi/version.h"      // IWYU pragma: export
