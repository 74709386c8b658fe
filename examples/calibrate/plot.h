// The picture of a calibration: error against bits, layer by layer.
#pragma once

#include <kivi/calibration.h>

#include <string>
#include <vector>

// Throws std::invalid_argument if there is no gnuplot.
void check_gnuplot();

// Draws a PNG with gnuplot.
void plot(const std::vector<kivi::LayerCalibration>& layers, double budget, const std::string& file);
