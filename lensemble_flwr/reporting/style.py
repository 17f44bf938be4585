"""The report's style sheet: dark on light, from phone width to paper."""

from __future__ import annotations

STYLE = """
:root {
  --ink: #1c2430; --soft: #5b6675; --rule: #d9dee4; --tint: #f5f7f9; --blue: #0b5fa5; --red: #b02a00; --green: #00664f;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial,
    sans-serif;
  --mono: ui-monospace, "SFMono-Regular", Menlo, Consolas, "Liberation Mono", monospace;
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 var(--sans);
  font-variant-numeric: tabular-nums lining-nums; overflow-wrap: break-word; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1, h2, h3 { line-height: 1.2; margin: 0; text-wrap: balance; overflow-wrap: anywhere; }
h1 { font-size: 2.25rem; font-weight: 700; letter-spacing: -0.015em; }
h2 { font-size: 1.4rem; font-weight: 700; letter-spacing: -0.008em; margin: 3.25rem 0 0.9rem; padding-top: 0.9rem;
  border-top: 2px solid var(--ink); }
h3 { font-size: 1rem; font-weight: 650; }
p { margin: 0 0 0.9rem; max-width: 46rem; text-wrap: pretty; }
code { font-family: var(--mono); font-size: 0.875em; overflow-wrap: anywhere; }
a { color: var(--blue); }
.soft { color: var(--soft); }
.nb { white-space: nowrap; }
.under-table { color: var(--soft); font-size: 0.875rem; line-height: 1.45; margin-top: 0.7rem; }
.eyebrow { color: var(--soft); font-size: 0.8125rem; font-weight: 600; letter-spacing: 0.08em;
  text-transform: uppercase; margin: 0 0 0.35rem; }
.facts { display: flex; flex-wrap: wrap; gap: 0.35rem 1.1rem; margin: 0.8rem 0 0; padding: 0; list-style: none;
  color: var(--soft); font-size: 0.9375rem; }
.facts li { overflow-wrap: anywhere; min-width: 0; }
.banner { margin: 1.75rem 0 0; padding: 1.1rem 1.4rem 1.2rem; border: 4px solid var(--red); background: #fff4ef;
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.banner strong { display: block; color: var(--red); font-size: 2rem; line-height: 1.1; letter-spacing: 0.03em;
  font-weight: 800; margin-bottom: 0.4rem; }
.banner p { margin: 0; }
.lede { font-size: 1.3rem; line-height: 1.5; max-width: 54rem; margin: 1.75rem 0 0; text-wrap: pretty;
  overflow-wrap: anywhere; }
.notice { margin: 1.4rem 0 0; padding: 0.8rem 1.1rem; border-left: 4px solid var(--red); background: var(--tint);
  max-width: 54rem; overflow-wrap: anywhere; }
.notice.calm { border-color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 0; margin: 2rem 0 0;
  border-top: 1px solid var(--rule); border-bottom: 1px solid var(--rule); }
.tile { padding: 0.9rem 1rem 1rem; border-left: 1px solid var(--rule); min-width: 0; }
.tile:first-child { border-left: 0; padding-left: 0; }
.tile dt { color: var(--soft); font-size: 0.875rem; line-height: 1.4; margin-bottom: 0.15rem; }
.tile dd { margin: 0; }
.tile .value { font-size: 1.6rem; font-weight: 650; line-height: 1.25; letter-spacing: -0.01em; }
.tile .value.word { font-size: 1.25rem; line-height: 1.6; }
.tile .under { color: var(--soft); font-size: 0.875rem; line-height: 1.4; }
table { border-collapse: collapse; width: 100%; font-size: 0.9375rem; line-height: 1.4; }
th, td { padding: 0.45rem 0.75rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-size: 0.8125rem; font-weight: 600; vertical-align: bottom;
  border-bottom: 1.5px solid var(--ink); }
tbody th { font-weight: 600; min-width: 3.5rem; }
.num { text-align: right; }
td.num { white-space: nowrap; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
tr.mine th, tr.mine td { background: #eaf2f9; font-weight: 650; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
tr.mine th:first-child { padding-left: 0.6rem; box-shadow: inset 4px 0 0 var(--blue); }
tr.mine td:last-child:not(.num) { font-weight: 400; }
tr.mine td.num:last-child, .short .num:last-child { padding-right: 0.6rem; }
table.short { max-width: 46rem; }
tr.burnt td, tr.burnt th { color: var(--red); }
tr.start td, tr.start th { color: var(--soft); font-weight: 400; }
.rounds td:last-child { min-width: 9rem; overflow-wrap: anywhere; }
.compare tbody th { min-width: 8.5rem; overflow-wrap: anywhere; }
.compare td:last-child { min-width: 10rem; overflow-wrap: anywhere; }
.badge { display: inline-block; max-width: 100%; padding: 0.1rem 0.55rem; border: 1.5px solid; border-radius: 1rem;
  font-size: 0.875rem; font-weight: 650; line-height: 1.35; }
.yes { color: var(--green); } .no { color: var(--red); } .meh { color: var(--soft); }
.claims th, .claims td { border-bottom: 0; padding-bottom: 0.1rem; }
.claims thead th { border-bottom: 1.5px solid var(--ink); padding-bottom: 0.45rem; }
.claims tbody { break-inside: avoid; }
.claims .main th, .claims .main td { padding-top: 0.75rem; }
.claims .fine td { padding-bottom: 0.8rem; border-bottom: 1px solid var(--rule); color: var(--soft);
  font-size: 0.8125rem; line-height: 1.5; }
.claims .fine p { max-width: none; margin: 0; overflow-wrap: anywhere; }
.claims td.eps, .claims td.holds { white-space: nowrap; }
.claims td.view { min-width: 5rem; }
.claims tbody th { overflow-wrap: anywhere; min-width: 9rem; }
.claims td.eps b { font-size: 1.125rem; line-height: 1; }
.claims td.says { overflow-wrap: anywhere; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure h3 { margin-bottom: 0.35rem; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: var(--sans); }
figcaption { color: var(--soft); font-size: 0.875rem; line-height: 1.45; margin-top: 0.4rem; max-width: 46rem;
  text-wrap: pretty; }
.narrow { display: none; }
.part { display: inline-block; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.6rem; margin: 0 0 1.2rem; padding: 0; list-style: none;
  font-size: 0.9375rem; }
.legend li { display: flex; align-items: center; gap: 0.45rem; }
.key { width: 1.35rem; height: 1.35rem; flex: none; background: #8b97a5; border-radius: 3px; }
.episode figure { margin-bottom: 1.4rem; } .episode .grid { margin: 0; row-gap: 0.6rem; }
.strip { display: grid; grid-template-columns: repeat(6, 1fr); gap: 0.6rem; }
.strip svg, .strip { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.strip .under { color: var(--soft); font-size: 0.8125rem; text-align: center; margin-top: 0.35rem; }
.strip svg { outline: 1px solid var(--rule); } .pixels { image-rendering: pixelated; }
.halo { fill: none; stroke: #fff; stroke-width: 4.2; } .ring { fill: none; stroke: #000; stroke-width: 1.8; }
.cross { fill: none; stroke: #000; stroke-width: 1.9; } .off { stroke: #fff; stroke-width: 1; }
.disc { fill: #d23600; stroke: #fff; stroke-width: 1.2; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 2.25rem 2.5rem; margin-top: 2rem; }
.compare { margin-top: 1.75rem; }
.settings { columns: 3; column-gap: 2.25rem; font-size: 0.875rem; line-height: 1.45; }
.settings section { break-inside: avoid; margin-bottom: 1.3rem; }
.settings h3 { font-size: 0.9375rem; padding-bottom: 0.2rem; margin-bottom: 0.2rem;
  border-bottom: 1px solid var(--rule); }
.settings dl { margin: 0; }
.settings div { display: flex; justify-content: space-between; gap: 0.9rem; }
.settings dt { color: var(--soft); overflow-wrap: anywhere; }
.settings dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 30%; }
.settings .set dt { color: var(--ink); font-weight: 650; }
.settings .set dd { font-weight: 650; }
.facts-table { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 1.5rem; margin: 0;
  font-size: 0.9375rem; }
.facts-table dt { color: var(--soft); }
.facts-table dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
ul.plain { margin: 0; padding-left: 1.2rem; max-width: 46rem; }
ul.plain li { margin-bottom: 0.5rem; }
footer { margin-top: 3rem; padding-top: 0.8rem; border-top: 1px solid var(--rule); color: var(--soft);
  font-size: 0.8125rem; overflow-wrap: anywhere; }

@media screen and (max-width: 56rem) {
  .tiles { grid-template-columns: 1fr 1fr; }
  .tile:nth-child(odd) { border-left: 0; padding-left: 0; }
  .tile:nth-child(n + 3) { border-top: 1px solid var(--rule); }
  .settings { columns: 2; }
  .grid { gap: 2rem 1.5rem; }
}
@media screen and (max-width: 44rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.7rem; }
  h2 { font-size: 1.25rem; margin-top: 2.5rem; }
  .lede { font-size: 1.125rem; margin-top: 1.25rem; }
  .banner { padding: 0.9rem 1rem 1rem; }
  .banner strong { font-size: 1.6rem; }
  .grid { grid-template-columns: 1fr; }
  .strip { grid-template-columns: repeat(3, 1fr); }
  .broad { display: none; }
  .narrow { display: block; }
  .settings { columns: 1; }
  .tile .value { font-size: 1.15rem; line-height: 1.5; }
  .tile .value.word { font-size: 1.1rem; }
  .facts-table { grid-template-columns: 1fr; gap: 0; }
  .facts-table dd { margin-bottom: 0.6rem; }
  .claims, .claims tbody, .claims tr, .claims th, .claims td { display: block; }
  .claims thead { display: none; }
  .claims tbody { padding: 0.8rem 0; border-bottom: 1px solid var(--rule); }
  .claims .main th, .claims .main td, .claims .fine td { padding: 0.1rem 0; border: 0; }
  .claims .main td.eps, .claims .main td.view, .claims .main td.holds { display: inline-block; margin-right: 1rem; }
  .claims td.view:not(:empty)::before { content: "view "; color: var(--soft); }
  .claims td.eps::before { content: attr(data-label) " "; color: var(--soft); }
  .scroll table { width: max-content; min-width: 100%; }
  .scroll table.short { width: 100%; }
  .scroll table.short th { white-space: normal; }
  .scroll { background:
      linear-gradient(90deg, #fff 50%, #fff0) 0 0 / 2rem 100% no-repeat local,
      linear-gradient(270deg, #fff 50%, #fff0) 100% 0 / 2rem 100% no-repeat local,
      linear-gradient(90deg, #1c243033, #1c243000) 0 0 / 0.5rem 100% no-repeat scroll,
      linear-gradient(270deg, #1c243033, #1c243000) 100% 0 / 0.5rem 100% no-repeat scroll; }
  .scroll th { white-space: nowrap; }
  .rounds td:last-child, .compare tbody th { min-width: 8.5rem; overflow-wrap: anywhere; }
.compare td:last-child { max-width: 16rem; }
}
@media print {
  @page { margin: 14mm; }
  html { font-size: 9.5pt; }
  body { font-size: 1rem; line-height: 1.45; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 7mm; break-after: avoid; }
  h3, h2 + p { break-after: avoid; }
  .lede { max-width: none; margin-top: 5mm; }
  .episode figure { margin-bottom: 4mm; }
  .banner, .notice, .tiles, .settings section, .facts-table, tr, li { break-inside: avoid; }
  .under-table { break-before: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  th, td { padding: 0.3rem 0.5rem; }
  .grid { gap: 6mm 8mm; margin-top: 4mm; }
  p, figcaption, ul.plain { max-width: none; }
  footer { margin-top: 5mm; padding-top: 2mm; break-before: avoid; }
}
""".strip()
