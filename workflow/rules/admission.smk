# fifo against pack admission on the embedded engine, beside the tables of the experiment it repeats.


rule admission_study:
    input:
        "config/embedded.yaml",
    output:
        "results/admission/admission.json",
        "results/admission/admission.txt",
    log:
        "results/admission/admission.log",
    shell:
        "python -m connector_tax.engine.admission_study --config {input:q}"
        " --output results/admission 2>{log}"
