# Time of one decode step against the context length, from decode_1.dat and decode_2.dat in the working folder; report.py
# writes them and calls this. `title` is set by the caller.
set datafile missing "nan"
set logscale xy
set xrange [50:42000]
set xtics ("64" 64, "128" 128, "256" 256, "1k" 1024, "2k" 2048, "4k" 4096, "8k" 8192, "16k" 16384, "32k" 32768)
set format y "%g"
set grid xtics ytics back lt 1 lw 0.7 lc rgb "#d8d8d8"
set key left top reverse Left samplen 3 spacing 1.2
set xlabel "cached tokens (64 to 256: all of them exact)"

do for [kind in "png svg"] {
  if (kind eq "png") {
    set terminal pngcairo size 1500,680 font "DejaVu Sans,12" enhanced
  } else {
    set terminal svg size 1500,680 font "DejaVu Sans,12" enhanced background rgb "white"
  }
  set output "decode.".kind
  set multiplot layout 1,2 title title font ",13"
  do for [threads = 1:2] {
    file = sprintf("decode_%d.dat", threads)
    set title sprintf("%d thread%s", threads, threads > 1 ? "s" : "")
    set ylabel (threads == 1 ? "milliseconds, least of many cold calls" : "")
    plot file using 1:5 with linespoints lw 1.5 pt 8 lc rgb "#7b3294" title "scaled\\_dot\\_product\\_attention, bf16", \
         file using 1:4 with linespoints lw 1.5 pt 6 lc rgb "#c2a5cf" title "scaled\\_dot\\_product\\_attention, fp32", \
         file using 1:3 with linespoints lw 1.5 pt 4 lc rgb "#ef8a62" title "two fp32 matmuls per kv head", \
         file using 1:2 with linespoints lw 2.5 pt 7 lc rgb "#01665e" title "Kivi K2V2, fast", \
         file using 1:6 with lines lw 1.5 dt 2 lc rgb "#555555" title "floor: reading Kivi's bytes from memory"
  }
  unset multiplot
  set output
}
