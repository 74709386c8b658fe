// Marks what the shared library shows.
#pragma once

#define KIVI_API __attribute__((visibility("default")))
